"""DeepSpeed in this process: its version, configuration, process group, operators and files on NVMe."""
