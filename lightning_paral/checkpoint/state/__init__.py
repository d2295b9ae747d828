"""The state in a checkpoint: weights, optimizer state and modules."""
