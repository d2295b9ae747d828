"""DeepSpeed in this process: its release, configuration, process group, operators and files on NVMe."""
