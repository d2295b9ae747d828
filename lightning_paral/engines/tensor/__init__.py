"""Tensor parallelism: layers whose features are split over ranks, which compute each layer together."""
