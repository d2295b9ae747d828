"""Storage, checksummed files, atomic commits, and host memory for staging."""
