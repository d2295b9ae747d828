"""Errors of torch and Lightning that count as refusals: they name the thing in words a user understands."""

CLEAR: dict[str, str] = {
    "Skipping the `training_step` by returning None in distributed training is not supported": "of Lightning",
    "The Finetuning callback does not support running with the DeepSpeed strategy": "of Lightning",
}
"""Pattern of the message -> whose it is, and why it is clear."""
