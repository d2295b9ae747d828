"""One checkpoint for every strategy and world size: what ranks hold, how it is written, committed and read."""
