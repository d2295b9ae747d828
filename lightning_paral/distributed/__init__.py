"""Ranks: who is what, process groups, launching, agreement, random states and failures."""
