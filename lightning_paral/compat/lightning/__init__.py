"""Private names and patches of Lightning and torchmetrics: one module per topic."""
