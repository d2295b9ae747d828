"""Steps: the user's optimizers, the gradients that they get, and what DeepSpeed runs in their place."""
