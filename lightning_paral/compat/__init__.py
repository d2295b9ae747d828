"""Private names and patches of torch, Lightning and DeepSpeed: one module for each thing that is changed."""
