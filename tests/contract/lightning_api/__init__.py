"""Lightning's public features, and what comes of each under every strategy."""
