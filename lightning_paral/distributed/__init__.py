"""Ranks: mesh, process group, launcher, exchanges between ranks, random states, and failures."""
