"""What stands between this package and names of torch, Lightning and DeepSpeed that move or are private."""
