"""What joins torch's `DistributedDataParallel` to Lightning, beyond what Lightning does."""
