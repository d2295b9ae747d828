"""Private names and patches of DeepSpeed, in one module. Import it only in code that runs ZeRO."""
