"""Connects DeepSpeed's ZeRO to Lightning. Modules here import deepspeed inside functions, only when a run needs it."""
