"""Callbacks that users add to a Trainer with any strategy."""
