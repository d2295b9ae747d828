"""Combine the outputs of the replicas."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_paral.data.parts.split import has_tensors, is_named_tuple
from lightning_paral.errors import ConfigurationError


def weighted_mean(values: Sequence[Any], weights: Sequence[float], device: torch.device) -> Any:
    """Return the mean of `values` weighted by `weights`. Differentiable.

    The mean of the replicas' mean losses, weighted by the sizes of the sub-batches, is the mean loss of the full batch.

    Args:
        values: numbers, or tensors of equal shape; added in this order.
        weights: one per value.
        device: the device of the result, if `values` are tensors.
    """
    total = sum(weights)
    if len(values) == 1 or total == 0:
        return _tensor_to(values[0], device)
    # Without those of weight 0: the mean of a part without targets is NaN.
    first, *others = [
        _tensor_to(value, device) * (each / total) for value, each in zip(values, weights, strict=True) if each
    ]
    return sum(others, start=first)


def join_training_output(
    outputs: Sequence[Any], sizes: Sequence[int], device: torch.device, weights: Sequence[float] | None = None
) -> Any:
    """Return what `training_step` would return for the full batch: the weighted mean of the losses, the rest gathered.

    A replica that returns `None` skips the step, and is left out of the mean.

    Args:
        outputs: what the replicas returned.
        sizes: the numbers of samples of the replicas.
        device: the device of the result.
        weights: the weights of the losses; by default `sizes`.

    Raises:
        ConfigurationError: the replicas returned values of different types.
    """
    kept = [each for each in zip(outputs, sizes, weights or sizes, strict=True) if each[0] is not None]
    if not kept:
        return None
    values, sizes, weights = zip(*kept, strict=True)
    if all(isinstance(value, Tensor) for value in values):
        return weighted_mean(values, weights, device)
    gathered = gather(values, sizes, device)
    if isinstance(gathered, Mapping) and all(isinstance(value.get("loss"), Tensor) for value in values):
        gathered["loss"] = weighted_mean([value["loss"] for value in values], weights, device)  # type: ignore[index]
    return gathered


def gather(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Return what a step would return for the full batch, with tensors on `device`.

    - Tensors with at least one dimension are concatenated along the first, in the order of the samples.
    - Lists and tuples are concatenated if they have one item per sample, or if their lengths differ. Otherwise they are
      gathered item by item, and so are mappings.
    - Floating-point scalars are treated as means over the samples, and averaged. Integers are treated as counts, and
      added.
    - For booleans and all other types, the value of the first replica is returned.

    Args:
        outputs: outputs of the replicas, in order.
        sizes: numbers of samples of the replicas.
        device: device of gathered tensors.

    Raises:
        ConfigurationError: the replicas returned values of different types, or mappings with different keys.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if len({type(output) for output in outputs}) > 1:
        raise ConfigurationError(
            "A step returned values of different types for different parts of a batch: "
            f"{', '.join(type(output).__name__ for output in outputs)}. Return the same type for every batch, or use "
            "paral_ddp."
        )
    if isinstance(first, Tensor):
        return _gather_tensors(outputs, sizes, device)
    if isinstance(first, Mapping):
        if any(output.keys() != first.keys() for output in outputs):
            raise ConfigurationError(
                f"A step returned different keys for different parts of a batch: "
                f"{' and '.join(str(sorted(map(str, output))) for output in outputs)}. Return the same keys for every "
                "batch, or use paral_ddp."
            )
        items = {key: gather([output[key] for output in outputs], sizes, device) for key in first}
        return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
    if is_named_tuple(first):
        return type(first)(*(gather(items, sizes, device) for items in zip(*outputs, strict=True)))
    if isinstance(first, list | tuple):
        return _gather_sequences(outputs, sizes, device)
    if isinstance(first, bool):
        return first
    if isinstance(first, int):
        return sum(outputs)
    if isinstance(first, float):
        return weighted_mean(outputs, sizes, device)
    return first


def _gather_tensors(tensors: Sequence[Tensor], sizes: Sequence[int], device: torch.device) -> Tensor:
    if tensors[0].dim():
        return torch.cat([tensor.to(device) for tensor in tensors])
    if tensors[0].is_floating_point() or tensors[0].is_complex():
        mean: Tensor = weighted_mean(tensors, sizes, device)
        return mean
    if tensors[0].dtype is torch.bool:
        return tensors[0].to(device)
    return torch.stack([tensor.to(device) for tensor in tensors]).sum()


def _gather_sequences(sequences: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    cls = type(sequences[0])
    lengths = [len(sequence) for sequence in sequences]
    hold_samples = all(
        all(isinstance(item, Tensor) and item.dim() and len(item) == size for item in sequence)
        for sequence, size in zip(sequences, sizes, strict=True)
    )
    per_sample = lengths == list(sizes) and not (hold_samples and has_tensors(sequences[0]))
    if per_sample or len(set(lengths)) > 1:
        return cls(move_data_to_device(item, device) for sequence in sequences for item in sequence)
    return cls(gather(items, sizes, device) for items in zip(*sequences, strict=True))


def _tensor_to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
