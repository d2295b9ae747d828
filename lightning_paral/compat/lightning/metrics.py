"""Caches of torchmetrics' metrics: the last step's value, the computed value, the number of updates."""

from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lightning_paral.compat.private_name import PrivateName

_SEEN = "torchmetrics 1.7 to 1.9"
_FORWARD_CACHE = PrivateName(
    name="torchmetrics.Metric._forward_cache",
    on_instances=True,
    purpose="to log the value that a metric had in a step, over all replicas",
    reason="forward returns it, and Lightning reads it here; no public attribute keeps it",
    seen=_SEEN,
)
_COMPUTED = PrivateName(
    name="torchmetrics.Metric._computed",
    on_instances=True,
    purpose="to give a metric the value computed over all ranks",
    reason="compute returns what is cached here, and takes no value",
    seen=_SEEN,
)
_UPDATE_COUNT = PrivateName(
    name="torchmetrics.Metric._update_count",
    on_instances=True,
    purpose="to let a metric without an update on this rank take part without a warning",
    reason="the public property update_count has no setter",
    seen=_SEEN,
)
NAMES = (
    _FORWARD_CACHE,
    _COMPUTED,
    _UPDATE_COUNT,
    PrivateName(
        name="torchmetrics.Metric._defaults",
        on_instances=True,
        purpose="to know which attributes of a metric are its states",
        reason="the public property metric_state is newer than torchmetrics 1.0",
        seen=_SEEN,
    ),
)


def states_of(metric: Metric) -> dict[str, Any]:
    """Return the states of `metric` by name: tensors, or lists."""
    return {name: getattr(metric, name) for name in metric._defaults}


def value_of_step(metric: Metric) -> Any:
    """Return what the last call of `metric` returned."""
    return metric._forward_cache


def set_value_of_step(metric: Metric, value: Tensor) -> None:
    """Set what the last call of `metric` returned to `value`."""
    _FORWARD_CACHE.replace_on(metric, value)


def set_computed(metric: Metric, value: Tensor | None) -> None:
    """Make `metric.compute()` return `value`, or compute again if `value` is `None`."""
    _COMPUTED.replace_on(metric, value)


def mark_updated(metric: Metric) -> None:
    """Mark `metric` as updated: other ranks' updates are merged into it."""
    _UPDATE_COUNT.replace_on(metric, max(1, metric.update_count))
