"""What joins FSDP2 (`torch.distributed.fsdp.fully_shard`) to Lightning."""
