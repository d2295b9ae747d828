"""Shards of weights, gradients and optimizer state: for checkpoints, readers and averages."""
