"""DeepSpeed in this process: its release, accelerator, process group and environment."""
