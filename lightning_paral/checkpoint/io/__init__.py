"""Storage, files with checksums, atomic commits, and host memory for staging."""
