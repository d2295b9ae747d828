"""Record the `self.log` calls of the replicas, and merge matching calls into one call on the master."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_paral.compat.lightning.metrics import set_value_of_step, value_of_step
from lightning_paral.compat.torch.cross_entropy import divisor_of
from lightning_paral.data.parts.join import weighted_mean

_SIGNATURE = inspect.signature(LightningModule.log)
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


@dataclass(frozen=True)
class LogCall:
    """One call of `self.log` in one replica."""

    arguments: dict[str, Any]
    num_samples: float
    """The weight of the value in a mean: the `batch_size` argument if given, otherwise the size of the sub-batch."""
    divisor: Any = None
    """What the value has been divided by, if it comes from a cross entropy."""


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
        self.batch_values: dict[int, Any] = {}
        """Values of logged metrics for this step, by the `id` of the master's metric."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Record a call. Replaces `LightningModule.log`."""
        arguments = dict(_SIGNATURE.bind(None, *args, **kwargs).arguments)
        del arguments["self"]
        value = arguments["value"]
        if isinstance(value, Metric):
            arguments["value"] = original = self._original_of(value)
            self.batch_values[id(original)] = value_of_step(value)
        given = arguments.get("batch_size")
        divisor = divisor_of(value) if isinstance(value, Tensor) else None  # now: the backward pass frees it
        self.calls.append(LogCall(arguments, self._num_samples if given is None else given, divisor))

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
        first = calls[0].arguments
        merged = dict(first)
        if first.get("batch_size") is not None:
            merged["batch_size"] = sum(call.arguments["batch_size"] for call in calls)
        if isinstance(first["value"], Metric):
            _merge_batch_value(first["value"], records, calls, device)
        elif len(calls) > 1:
            graph = first.get("enable_graph", False)
            values = [call.arguments["value"] for call in calls]
            values = [value if graph or not isinstance(value, Tensor) else value.detach() for value in values]
            weights = [call.num_samples for call in calls]
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


def _merge_batch_value(
    metric: Metric, records: Sequence[LogRecord], calls: Sequence[LogCall], device: torch.device
) -> None:
    cached = [record.batch_values[id(metric)] for record in records if id(metric) in record.batch_values]
    if len(cached) == len(calls) and all(isinstance(value, Tensor) for value in cached):
        merged = weighted_mean([value.detach() for value in cached], [c.num_samples for c in calls], device)
        set_value_of_step(metric, merged)
