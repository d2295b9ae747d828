"""Predict memory and traffic of a fit for every strategy, and choose one."""
