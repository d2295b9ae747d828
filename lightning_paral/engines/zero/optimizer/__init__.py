"""The user's optimizers, and what DeepSpeed is given in their place."""
