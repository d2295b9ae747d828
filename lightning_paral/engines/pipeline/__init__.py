"""Pipeline parallel: consecutive units of a module on each stage, and micro-batches that pass through the stages."""
