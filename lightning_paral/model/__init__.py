"""What is done to a user's module without changing it: units, activation checkpointing, deferred construction."""
