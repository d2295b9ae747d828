"""Divide a batch into parts."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_paral.errors import ConfigurationError


def split_batch(batch: Any, devices: Sequence[torch.device]) -> tuple[list[Any], list[int]]:
    """Divide `batch` among `devices`.

    - Tensors are divided along their first dimension into parts whose sizes differ by at most one; 0-dimensional
      tensors are copied to every device.
    - Packed sequences are divided by sample.
    - A list without tensors, or a tuple of strings, is divided like a tensor if it has one item per sample.
    - Mappings, dataclasses, other lists, other tuples and named tuples are divided item by item.
    - All sub-batches share objects of any other type.

    If the batch has fewer samples than there are devices, the last devices get none. A batch without a tensor to divide
    is returned as a single sub-batch of size 1.

    Returns:
        The sub-batches, in order, each on its device, and the number of samples in each.

    Raises:
        ConfigurationError: tensors differ in their first dimension, so the number of samples is ambiguous.
    """
    num_samples = num_samples_of(batch)
    if num_samples is None:
        return [batch], [1]
    num_parts = max(1, min(len(devices), num_samples))
    if num_parts == 1:
        return [batch], [num_samples]
    ends = [num_samples * (part + 1) // num_parts for part in range(num_parts)]
    starts = [0, *ends[:-1]]
    parts = [
        _take(batch, slice(start, end), num_samples, device)
        for start, end, device in zip(starts, ends, devices, strict=False)
    ]
    return parts, [end - start for start, end in zip(starts, ends, strict=True)]


def first_samples(batch: Any, start: int, stop: int, step: int = 1) -> Any:
    """Return the samples of `batch` from `start` to `stop - 1`, or `None` if it does not have `start + 1` samples."""
    num_samples = num_samples_of(batch)
    if num_samples is None:
        return batch if start == 0 else None
    if start >= num_samples and num_samples > 0:
        return None
    return _take(batch, slice(start, min(stop, num_samples), step), num_samples, None)


def is_named_tuple(value: object) -> bool:
    """Return whether `value` is a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def has_tensors(value: Any) -> bool:
    """Return whether `value` contains a tensor or a packed sequence, at any depth."""
    return next(_tensors(value, ""), None) is not None


def num_samples_of(batch: Any) -> int | None:
    """Return the size of the first dimension, which all tensors share; `None` if no tensor has a dimension.

    Raises:
        ConfigurationError: tensors differ in their first dimension, so the number of samples is ambiguous.
    """
    sizes = {path: size for path, size in _tensors(batch, "batch") if size is not None}
    if len(set(sizes.values())) > 1:
        first_of_size: dict[int, str] = {}
        for path, size in sizes.items():
            first_of_size.setdefault(size, path)
        found = ", ".join(f"{path} has {size}" for size, path in first_of_size.items())
        raise ConfigurationError(
            "Batches are divided along the first dimension of their tensors, but its size differs within this batch: "
            f"{found}. Keep tensors that do not belong to samples in buffers of the module, not in the batch, or use "
            "paral_ddp, which divides the data set instead."
        )
    return next(iter(sizes.values()), None)


def _tensors(value: Any, path: str) -> Iterator[tuple[str, int | None]]:
    """Yield the path of each tensor in `value`, and the size of its first dimension; `None` for a 0-d tensor."""
    if isinstance(value, PackedSequence):
        yield path, int(value.batch_sizes[0])
    elif isinstance(value, Tensor):
        yield path, value.shape[0] if value.dim() else None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{key!r}]")
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None), f"{path}.{field.name}")
    elif is_named_tuple(value):
        for name, item in zip(value._fields, value, strict=True):
            yield from _tensors(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}[{index}]")


def _take(value: Any, samples: slice, num_samples: int, device: torch.device | None) -> Any:
    """Return the part of `value` that belongs to `samples`, on `device`, or on the same devices if it is `None`."""

    def take(item: Any) -> Any:
        return _take(item, samples, num_samples, device)

    if isinstance(value, PackedSequence):
        return _take_packed(value, samples, device)
    if isinstance(value, Tensor):
        part = value[samples] if value.dim() else value
        # Copy even on CPU: views share a version counter, so autograd would take an in-place operation of one replica
        # for a change to the input of another. A view with steps is not contiguous, which code may rely on.
        return part.to(device, non_blocking=True, copy=bool(samples.start or samples.step))
    if isinstance(value, Mapping):
        items = {key: take(item) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(items)  # type: ignore[call-arg]
        mapping = copy.copy(value)
        for key, item in items.items():
            mapping[key] = item
        return mapping
    if _is_dataclass(value):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(record, field.name, take(getattr(value, field.name)))
        return record
    if is_named_tuple(value):
        return type(value)(*map(take, value))
    if _is_per_sample(value, num_samples):
        return value[samples]
    if isinstance(value, list | tuple):
        return type(value)(map(take, value))
    return value


def _is_per_sample(value: Any, num_samples: int) -> bool:
    if not isinstance(value, list | tuple) or len(value) != num_samples:
        return False
    if isinstance(value, tuple):
        return all(isinstance(item, str) for item in value)
    return not has_tensors(value)


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _take_packed(packed: PackedSequence, samples: slice, device: torch.device | None) -> PackedSequence:
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    lengths = lengths[samples]
    part = padded[samples, : int(lengths.max())]
    in_order = packed.sorted_indices is None
    return pack_padded_sequence(part.to(device), lengths, batch_first=True, enforce_sorted=in_order)
