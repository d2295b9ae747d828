"""Caches of torchmetrics' metrics: the value of the last step, the computed value, and the number of updates."""

from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lightning_paral.compat.private_name import PrivateName

_SEEN = "torchmetrics 1.7 to 1.9"
_FORWARD_CACHE = PrivateName(
    name="torchmetrics.Metric._forward_cache",
    on_instances=True,
    purpose="to log the value of a metric in a step, computed over all replicas",
    reason="Lightning reads it here, and no public attribute sets it",
    seen=_SEEN,
)
_COMPUTED = PrivateName(
    name="torchmetrics.Metric._computed",
    on_instances=True,
    purpose="to give a metric the value computed over all ranks",
    reason="compute returns the value cached here, and no public function sets it",
    seen=_SEEN,
)
_UPDATE_COUNT = PrivateName(
    name="torchmetrics.Metric._update_count",
    on_instances=True,
    purpose="to compute a metric that other ranks have updated, but not this one, without a warning",
    reason="the public property update_count has no setter",
    seen=_SEEN,
)
NAMES = (_FORWARD_CACHE, _COMPUTED, _UPDATE_COUNT)


def value_of_step(metric: Metric) -> Any:
    """Return the value that the last call of `metric` returned."""
    return metric._forward_cache


def set_value_of_step(metric: Metric, value: Tensor) -> None:
    """Replace the value that the last call of `metric` returned with `value`."""
    _FORWARD_CACHE.replace_on(metric, value)


def set_computed(metric: Metric, value: Tensor | None) -> None:
    """Make `metric.compute()` return `value`, or compute again if `value` is `None`."""
    _COMPUTED.replace_on(metric, value)


def mark_updated(metric: Metric) -> None:
    """Mark `metric` as updated, because updates of other ranks are merged into it."""
    _UPDATE_COUNT.replace_on(metric, max(1, metric.update_count))
