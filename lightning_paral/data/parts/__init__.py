"""Divide a batch into parts, run a step on each, and combine what the steps return and log."""
