"""Train LightningModules with FSDP2 (`torch.distributed.fsdp.fully_shard`)."""
