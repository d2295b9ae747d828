"""Runs under torchrun that lose ranks and nodes, restart, and end like undisturbed ones."""
