"""Private names and patches of torch: one module for each idea."""
