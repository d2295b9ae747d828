"""Data parallelism within one process: scatter, replicate, run a thread per device, gather."""
