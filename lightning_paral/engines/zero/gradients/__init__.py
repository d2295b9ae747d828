"""Partitioned gradients: which parameters take part, norms, clipping and loss scales."""
