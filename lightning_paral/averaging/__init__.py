"""Averages of weights (EMA, SWA), sharded as the weights are: each rank averages what it holds of them."""
