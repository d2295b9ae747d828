"""Divide a batch into parts, and combine what a step returns and logs for each of them."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torchmetrics import Metric

from lightning_paral.compat.lightning.results import set_value_of_step, value_of_step
from lightning_paral.compat.torch.tensors import divisor_of
from lightning_paral.errors import ConfigurationError

_SIGNATURE = inspect.signature(LightningModule.log)
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


def split_batch(batch: Any, devices: Sequence[torch.device]) -> tuple[list[Any], list[int]]:
    """Divide `batch` among `devices`.

    - Tensors are divided along their first dimension into parts whose sizes differ by at most one; 0-dimensional
      tensors are copied to every device.
    - A list without tensors, or a tuple of strings, is divided like a tensor if it has one item per sample.
    - Mappings, dataclasses, and other lists and tuples are divided item by item.
    - All sub-batches share objects of any other type.

    If the batch has fewer samples than there are devices, the last devices get none. A batch without a tensor to divide
    is returned as a single sub-batch of size 1.

    Returns:
        The sub-batches, in order, each on its device, and the number of samples in each.

    Raises:
        ConfigurationError: tensors differ in their first dimension, so the number of samples is ambiguous, or there is
            a packed sequence.
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


def num_samples_of(batch: Any) -> int | None:
    """Return the size of the first dimension, which all tensors share; `None` if no tensor has a dimension.

    Raises:
        ConfigurationError: tensors differ in their first dimension, so the number of samples is ambiguous, or there is
            a packed sequence.
    """
    sizes = {path: len(tensor) for path, tensor in _tensors(batch) if tensor.dim()}
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


def _tensors(value: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield the path of each tensor in `value`, and the tensor."""
    if isinstance(value, PackedSequence):
        raise ConfigurationError(
            f"{path} is a PackedSequence, which cannot be divided into parts. Let the loader return padded tensors and "
            "their lengths, and pack them in the step, or use paral_ddp, which divides the data set instead."
        )
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{key!r}]")
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None), f"{path}.{field.name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}[{index}]")


def _take(value: Any, samples: slice, num_samples: int, device: torch.device | None) -> Any:
    """Return the part of `value` that belongs to `samples`, on `device`, or on the same devices if it is `None`."""

    def take(item: Any) -> Any:
        return _take(item, samples, num_samples, device)

    if isinstance(value, Tensor):
        part = value[samples] if value.dim() else value
        # Copy even on CPU: views share a version counter, so autograd would take an in-place operation of one replica
        # for a change to the input of another. A view with steps is not contiguous, which code may rely on.
        return part.to(device, non_blocking=True, copy=bool(samples.start or samples.step))
    if isinstance(value, Mapping):
        mapping: Any = copy.copy(value)
        for key, item in value.items():
            mapping[key] = take(item)
        return mapping
    if _is_dataclass(value):
        record = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(record, field.name, take(getattr(value, field.name)))  # it may be frozen
        return record
    if isinstance(value, list | tuple):
        holds_strings = all(isinstance(item, str) for item in value)
        if len(value) == num_samples and (holds_strings or (isinstance(value, list) and not any(_tensors(value)))):
            return value[samples]
        return _like(value, map(take, value))
    return value


def _like(sequence: Any, items: Iterable[Any]) -> Any:
    """Return a list, tuple or named tuple of the type of `sequence`."""
    return type(sequence)(*items) if hasattr(sequence, "_fields") else type(sequence)(items)


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


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
    if isinstance(first, list | tuple):
        return _gather_sequences(outputs, sizes, device)
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(outputs)
    return weighted_mean(outputs, sizes, device) if isinstance(first, float) else first


def _gather_tensors(tensors: Sequence[Tensor], sizes: Sequence[int], device: torch.device) -> Tensor:
    moved = [tensor.to(device) for tensor in tensors]
    if moved[0].dim():
        return torch.cat(moved)
    if moved[0].is_floating_point() or moved[0].is_complex():
        mean: Tensor = weighted_mean(moved, sizes, device)
        return mean
    return moved[0] if moved[0].dtype is torch.bool else torch.stack(moved).sum()


def _gather_sequences(sequences: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    lengths = [len(sequence) for sequence in sequences]
    hold_samples = all(
        all(isinstance(item, Tensor) and item.dim() and len(item) == size for item in sequence)
        for sequence, size in zip(sequences, sizes, strict=True)
    )
    per_sample = lengths == list(sizes) and not (hold_samples and sequences[0])
    if not hasattr(sequences[0], "_fields") and (per_sample or len(set(lengths)) > 1):
        return _like(sequences[0], (move_data_to_device(item, device) for each in sequences for item in each))
    return _like(sequences[0], (gather(items, sizes, device) for items in zip(*sequences, strict=True)))


def _tensor_to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class LogCall:
    """One call of `self.log` in one replica."""

    arguments: dict[str, Any]
    num_samples: float
    """The weight of the value in a mean: the `batch_size` argument if given, otherwise the size of the sub-batch."""
    divisor: Any = None
    """What the value has been divided by, if it comes from a cross entropy."""
    value_of_step: Any = None
    """The value of a metric for this step."""


class LogRecord:
    """Records what one replica logs during a step.

    Args:
        num_samples: the size of the replica's sub-batch.
        original_of: maps a replica's copy of a metric to the master's metric; by default, they are the same.
    """

    def __init__(self, num_samples: int, original_of: Callable[[object], object] = lambda metric: metric) -> None:
        self.calls: list[LogCall] = []
        self._num_samples = num_samples
        self._original_of = original_of

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Record a call. Replaces `LightningModule.log`."""
        arguments = dict(_SIGNATURE.bind(None, *args, **kwargs).arguments)
        del arguments["self"]
        value, given = arguments["value"], arguments.get("batch_size")
        divisor = divisor_of(value) if isinstance(value, Tensor) else None  # now: the backward pass frees it
        of_step = None
        if isinstance(value, Metric):
            arguments["value"], of_step = self._original_of(value), value_of_step(value)
        self.calls.append(LogCall(arguments, self._num_samples if given is None else given, divisor, of_step))

    def weigh(self, loss: float, weight: float) -> None:
        """Let cross entropies count with what they divide by in means, and values that equal `loss` with `weight`."""
        for number, call in enumerate(self.calls):
            value = call.arguments["value"]
            is_loss = isinstance(value, Tensor | float) and str(float(value)) == str(loss)  # NaN equals NaN
            if is_loss or call.divisor is not None:
                self.calls[number] = replace(call, num_samples=weight if is_loss else float(call.divisor))


def merge_logs(records: Sequence[LogRecord], device: torch.device) -> Iterator[dict[str, Any]]:
    """Merge matching calls of the replicas, and yield the arguments of each merged call, with values on `device`.

    Values are reduced with `reduce_fx` over the replicas that logged them. `"mean"`, the default, is weighted by the
    numbers of samples; `"sum"`, `"min"` and `"max"` are not weighted. Explicit batch sizes are added. The value of a
    metric for the step is the mean of the replicas' values. Its state is exact, and so is its value for the epoch.
    """
    for calls in _matching_calls(records):
        first, weights = calls[0].arguments, [call.num_samples for call in calls]
        merged = dict(first)
        if first.get("batch_size") is not None:
            merged["batch_size"] = sum(call.arguments["batch_size"] for call in calls)
        if isinstance(first["value"], Metric):
            of_step = [call.value_of_step for call in calls]
            if all(isinstance(value, Tensor) for value in of_step):
                mean = weighted_mean([value.detach() for value in of_step], weights, device)
                set_value_of_step(first["value"], mean)
        elif len(calls) > 1:
            graph = first.get("enable_graph", False)
            values = [call.arguments["value"] for call in calls]
            values = [value if graph or not isinstance(value, Tensor) else value.detach() for value in values]
            merged["value"] = _reduce(values, weights, first.get("reduce_fx", "mean"), device)
        elif isinstance(first["value"], Tensor):
            merged["value"] = first["value"].to(device)
        yield merged


def _matching_calls(records: Sequence[LogRecord]) -> list[list[LogCall]]:
    """Group the calls of the replicas: the n-th call with a name in one replica matches the n-th in the others."""
    groups: dict[tuple[str, int], list[LogCall]] = {}
    for record in records:
        times: dict[str, int] = {}
        for call in record.calls:
            name = call.arguments["name"]
            times[name] = times.get(name, 0) + 1
            groups.setdefault((name, times[name]), []).append(call)
    return list(groups.values())


def _reduce(values: list[Any], weights: list[float], reduce_fx: Any, device: torch.device) -> Any:
    name = getattr(reduce_fx, "__name__", str(reduce_fx)).lower()
    if name not in _REDUCTIONS:
        return weighted_mean(values, weights, device)
    return _REDUCTIONS[name](torch.stack([torch.as_tensor(value, device=device) for value in values]), dim=0)
