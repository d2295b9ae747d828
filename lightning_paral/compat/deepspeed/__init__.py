"""Private names and patches of DeepSpeed: one module for each idea that needs them. Import it only where ZeRO runs."""
