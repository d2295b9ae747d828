"""What joins each engine to Lightning: DDP, FSDP2, DeepSpeed's ZeRO, threads. Engines never import each other."""
