"""One checkpoint for every strategy and world size: the shards of the ranks, and how they are saved and loaded."""
