"""Caches of torchmetrics' metrics: the value of the last step, the value that was computed, the number of updates."""

from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lightning_paral.compat.private_name import PrivateName

_SEEN = "torchmetrics 1.0 to 1.9"
_FORWARD_CACHE = PrivateName(
    name="torchmetrics.Metric._forward_cache",
    on_instances=True,
    purpose="to log the value that a metric had in a step, joined over replicas",
    reason="forward returns it and Lightning reads it from here; nothing public keeps it",
    seen=_SEEN,
)
_COMPUTED = PrivateName(
    name="torchmetrics.Metric._computed",
    on_instances=True,
    purpose="to give a metric the value that was computed over all ranks",
    reason="compute returns what it keeps here, and takes no value",
    seen=_SEEN,
)
_UPDATE_COUNT = PrivateName(
    name="torchmetrics.Metric._update_count",
    on_instances=True,
    purpose="to let a metric without a batch of its own take part without a warning",
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
    """Return the states of `metric` by name: tensors, and lists of what is collected."""
    return {name: getattr(metric, name) for name in metric._defaults}


def value_of_step(metric: Metric) -> Any:
    """Return what the last call of `metric` returned."""
    return metric._forward_cache


def set_value_of_step(metric: Metric, value: Tensor) -> None:
    """Let `value` be what the last call of `metric` returned."""
    _FORWARD_CACHE.replace_on(metric, value)


def set_computed(metric: Metric, value: Tensor | None) -> None:
    """Let `metric.compute()` return `value`; compute anew if it is `None`."""
    _COMPUTED.replace_on(metric, value)


def count_as_updated(metric: Metric) -> None:
    """Let `metric` count as updated: it is joined with the updates of other ranks."""
    _UPDATE_COUNT.replace_on(metric, max(1, metric.update_count))
