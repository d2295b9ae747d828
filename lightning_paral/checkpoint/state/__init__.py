"""What goes into a checkpoint and comes out of one: weights, optimizer state, hyper-parameters."""
