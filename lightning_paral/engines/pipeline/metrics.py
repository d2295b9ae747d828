"""Compute torchmetrics on the last stage, whose steps update them, and share their values with the other stages."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torchmetrics import Metric

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.data.metrics import find_metrics
from lightning_paral.engines.pipeline.results import StepResults


def share_values(
    roots: Iterable[object], results: StepResults, is_in_step: Callable[[], bool], undo: ExitStack
) -> None:
    """Make `compute` of the metrics in `roots` return the value of the last stage on all stages.

    Until `undo` is closed, `compute` is *collective* over the pipeline, except inside a step, which only the last stage
    runs to its end.

    Args:
        roots: the LightningModule and the callbacks.
        results: sends the values.
        is_in_step: returns whether a step of the module is running.
        undo: a stack to which functions that undo the changes are pushed.
    """
    computing: list[Metric] = []

    def share(metric: Metric) -> None:
        compute = metric.compute

        def compute_on_last() -> Any:
            if is_in_step() or computing:  # wrappers of metrics compute those that they contain
                return compute()
            if not results.is_last:
                return results.share_value(None)
            computing.append(metric)
            try:
                value = compute()
            finally:
                computing.clear()
            return results.share_value(value)

        shadow_method(metric, "compute", compute_on_last, None)
        undo.callback(vars(metric).__setitem__, "compute", compute)

    for metric in find_metrics(roots):
        if isinstance(metric, Metric):
            share(metric)
