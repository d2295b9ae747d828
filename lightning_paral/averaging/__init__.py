"""Averages of weights (EMA, SWA) of which every rank keeps what it holds of the weights."""
