"""Start the other local ranks, and check before that they can run."""
