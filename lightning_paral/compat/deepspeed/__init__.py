"""Private names and patches of DeepSpeed: one module for each idea. Import them only where ZeRO runs."""
