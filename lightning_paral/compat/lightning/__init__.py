"""Private names and patches of Lightning and torchmetrics: one module for each idea."""
