"""Private names and patches of DeepSpeed: one module per topic. Import them only in code that runs ZeRO."""
