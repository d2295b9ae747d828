"""Writing and reading files: storage, checksums, atomic commits, staging."""
