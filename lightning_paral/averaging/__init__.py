"""Averages of weights (EMA, SWA) that are sharded like the weights: each rank averages its own shards."""
