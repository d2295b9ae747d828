"""Checks of a machine, and benchmarks."""
