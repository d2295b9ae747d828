"""Logged values: the collection behind `self.log`, and the caches of torchmetrics' metrics."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from torch import Tensor
from torchmetrics import Metric

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.private_name import Names, replace
from lightning_paral.compat.torch.patches import replace_attributes

__all__ = ["ResultCollection", "ResultMetric"]

NAMES: Names = {
    "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection": {
        "log(fx, name, value, sync_dist_fn, add_dataloader_idx)": "reduce a value with a checksum of its key",
        "update_metrics(key, value, batch_size)": "reduce values separately in uneven steps",
        "metrics(on_step)": "report keys that only some ranks have logged",
        ".dataloader_idx": "know to which loader results belong",
        ".batch": "know when a training batch begins and ends",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result": {
        "_ResultMetric(metadata, is_tensor)": "create the value of a key that this rank has not logged",
    },
    "torchmetrics.Metric": {
        "._forward_cache": "log the value of a metric in a step, computed over all replicas",
        "._computed": "give a metric the value computed over all ranks",
        "_sync_dist(dist_sync_fn, process_group)": "gather list states of different lengths",
    },
}


# Caches of torchmetrics' metrics, and how metrics gather their states


def replace_gathering(gather: Callable[..., None]) -> Callable[[], None]:
    """Make metrics gather their states with `gather`; return a function that restores how they did.

    Args:
        gather: called with the metric, its own method for that, and the two arguments of this method, which are the
            function that gathers a tensor, and, as `process_group`, a process group or `None`.
    """
    sync = Metric.sync

    def sync_with_gather(self: Metric, *args: Any, **kwargs: Any) -> None:
        # Set on the instance and only here, because subclasses have methods of their own, and copies would share it.
        with ExitStack() as undo:
            shadow_method(self, "_sync_dist", partial(gather, self, self._sync_dist), undo)
            sync(self, *args, **kwargs)

    return replace_attributes(Metric, {"sync": sync_with_gather})


def value_of_step(metric: Metric) -> Any:
    """Return the value that the last call of `metric` returned."""
    return metric._forward_cache


def set_value_of_step(metric: Metric, value: Tensor) -> None:
    """Replace the value that the last call of `metric` returned with `value`."""
    replace(metric, "_forward_cache", value)


def set_computed(metric: Metric, value: Tensor | None) -> None:
    """Make `metric.compute()` return `value`, or compute again if `value` is `None`."""
    replace(metric, "_computed", value)
