"""The table of Lightning's public features: the outcome of each under every strategy."""
