"""Callbacks with several ranks."""
