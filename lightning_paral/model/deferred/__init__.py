"""Deferred construction: a module is built without values, which are computed later, a unit at a time."""
