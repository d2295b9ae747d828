"""Errors of torch and Lightning that count as refusals: they name the thing in words a user understands."""

CLEAR: dict[str, str] = {}
"""Pattern of the message -> whose it is, and why it is clear."""
