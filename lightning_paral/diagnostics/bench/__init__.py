"""The benchmarks of `paral bench`: collectives, training steps, checkpoints and optimizers on the host."""
