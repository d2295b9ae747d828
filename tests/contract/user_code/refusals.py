"""Errors of torch and Lightning that count as refusals, because a user understands what they name."""

CLEAR: dict[str, str] = {
    "Sharded tensors \\(DTensors\\) and plain tensors were mixed in one operation": "torch, explained by this package",
    "torch cannot do this operation on a sharded tensor": "torch, explained by this package",
    "A parameter was created from one that ZeRO shards": "torch, explained by this package",
    "A module that is sharded was copied with copy.deepcopy": "torch, explained by this package",
    "A weight was used while each rank had only its shard of it": "torch, explained by this package",
    "Weights got gradients from a second backward pass": "DeepSpeed, explained by this package",
    "of stage \\d+, a tensor of which this rank holds only a shard": "torch, with an error of this package",
    "The Finetuning callback does not support running with the DeepSpeed strategy": "Lightning",
}
"""Pattern of the message -> the library that it comes from."""
