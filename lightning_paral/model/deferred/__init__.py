"""Deferred construction: build a module without allocating its parameters, and materialize them unit by unit."""
