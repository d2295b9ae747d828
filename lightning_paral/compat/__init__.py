"""Private names and patches of torch, Lightning and DeepSpeed, one idea a module, each with its reason."""
