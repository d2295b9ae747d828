"""Private names of torch and patches of it: one module for each idea."""
