"""Averages of weights (EMA, SWA), sharded as the weights are: each rank averages its own shards."""
