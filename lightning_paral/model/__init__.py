"""Work on a user's module that leaves its code alone: units, activation checkpointing, deferred construction."""
