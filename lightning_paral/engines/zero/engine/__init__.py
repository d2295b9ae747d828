"""DeepSpeed's engines around a module: construction, steps, hooks and precision."""
