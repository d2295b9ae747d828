"""`self.log` in replicas: calls are collected, and made once on the master, with merged values."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_paral.compat.lightning.metrics import set_value_of_step, value_of_step
from lightning_paral.engines.dp.gather import weigh

_SIGNATURE = inspect.signature(LightningModule.log)
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}


@dataclass(frozen=True)
class LogCall:
    """One call of `self.log` in one replica."""

    arguments: dict[str, Any]
    num_samples: float
    """What the value weighs in a mean: the given `batch_size`, else the samples of the replica."""


class LogRecord:
    """What one replica logs during a step.

    Args:
        num_samples: in the replica's sub-batch.
        original_of: gives for a replica's copy of a metric the master's metric.
    """

    def __init__(self, num_samples: int, original_of: Callable[[object], object]) -> None:
        self.calls: list[LogCall] = []
        self._num_samples = num_samples
        self._original_of = original_of
        self.batch_values: dict[int, Any] = {}

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Stand in for `LightningModule.log`."""
        arguments = dict(_SIGNATURE.bind(None, *args, **kwargs).arguments)
        del arguments["self"]
        value = arguments["value"]
        if isinstance(value, Metric):
            arguments["value"] = original = self._original_of(value)
            self.batch_values[id(original)] = value_of_step(value)
        given = arguments.get("batch_size")
        self.calls.append(LogCall(arguments, self._num_samples if given is None else given))


def merge_logs(records: Sequence[LogRecord], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the arguments of the calls of `log` that stand for those of all replicas, values on `device`.

    A value logged with `reduce_fx="mean"`, the default, is the mean over the replicas that logged it, by their number
    of samples; `"sum"`, `"min"` and `"max"` are what they say. A `batch_size` that was given is summed. A metric's
    value for the step becomes the mean of the replicas' values; its state, and so its value for the epoch, is exact.
    """
    for calls in _in_order(records):
        first = calls[0].arguments
        merged = dict(first)
        if first.get("batch_size") is not None:
            merged["batch_size"] = sum(call.num_samples for call in calls)
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


def _in_order(records: Sequence[LogRecord]) -> list[list[LogCall]]:
    """Return the calls that belong together: the same name for the n-th time, in each replica that made it."""
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
        return weigh(values, weights, device)
    return _REDUCTIONS[name](torch.stack([torch.as_tensor(value, device=device) for value in values]), dim=0)


def _merge_batch_value(
    metric: Metric, records: Sequence[LogRecord], calls: Sequence[LogCall], device: torch.device
) -> None:
    cached = [record.batch_values[id(metric)] for record in records if id(metric) in record.batch_values]
    if len(cached) == len(calls) and all(isinstance(value, Tensor) for value in cached):
        merged = weigh([value.detach() for value in cached], [c.num_samples for c in calls], device)
        set_value_of_step(metric, merged)
