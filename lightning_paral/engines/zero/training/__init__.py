"""Training steps: the user's optimizers, their sharded gradients, and the optimizers that DeepSpeed runs for them."""
