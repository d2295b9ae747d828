"""Errors of torch and Lightning that count as refusals: they name the thing in words a user understands."""

CLEAR: dict[str, str] = {
    "Skipping the `training_step` by returning None in distributed training is not supported": "of Lightning",
    "Sharded tensors \\(DTensors\\) and plain tensors were mixed in one operation": "of torch, explained by us",
    "torch cannot do this operation on a sharded tensor": "of torch, explained by us",
    "A parameter was created from one that ZeRO shards": "of torch, explained by us",
    "A module that is sharded was copied with copy.deepcopy": "of torch, explained by us",
    "The Finetuning callback does not support running with the DeepSpeed strategy": "of Lightning",
}
"""Pattern of the message -> whose it is, and why it is clear."""
