"""Private names and patches of torch: one module per topic."""
