"""Private names of torch, Lightning and DeepSpeed that are used or replaced, one module for each idea."""
