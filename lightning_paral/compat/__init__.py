"""Private names and patches of torch, Lightning and DeepSpeed: one module per idea, each with its reason."""
