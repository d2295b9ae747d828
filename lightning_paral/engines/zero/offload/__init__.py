"""Offload to the host and to NVMe: what it compiles, checks and stores."""
