"""What joins DeepSpeed's ZeRO to Lightning. Modules here import deepspeed inside functions, when a run needs it."""
