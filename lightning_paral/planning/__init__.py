"""Predict memory, traffic and time of a fit for every strategy, and choose one."""
