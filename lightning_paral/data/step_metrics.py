"""Metrics that ranks synchronize in each step: torchmetrics with `dist_sync_on_step=True`."""

from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_paral.data.logged_steps import EVERY_RANK, LoggedSteps
from lightning_paral.distributed.mesh import ParallelDims

_SYNCHRONIZES = " with dist_sync_on_step=True"
_EVERY_METRIC = (
    "Every rank must call and compute the same metrics with dist_sync_on_step=True, in the same order. Where only some "
    "ranks have something to count, call `metric.update(...)`, which waits for no other rank."
)


def record_synchronizations(
    module: Module, dims: ParallelDims, steps: LoggedSteps, timeout: timedelta, undo: ExitStack
) -> None:
    """Record when metrics of `module` synchronize, until `undo` is closed. *Collective* over the data ranks.

    States on the CPU are gathered in a group of their own, so that gloo does not take another collective for theirs.

    Args:
        module: the module. Metrics that have a function for synchronizing, or a process group, are left as they are.
        dims: the parallel dimensions.
        steps: where synchronizations over the data ranks are recorded.
        timeout: the timeout of the group.
        undo: a stack to which functions that undo the changes are pushed.
    """
    ranks = dims.data_rank_group()
    found = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, Metric)
        and (part.dist_sync_on_step and part.dist_sync_fn is None)
        and (part.process_group is None or part.process_group is dims.data_group())
    ]
    # The modules have not been compared yet: they may differ between ranks.
    if not any(ranks.gather(bool(found))):
        return
    group = dims.group_for_only("metrics", timeout)
    for name, part in found:
        part.dist_sync_fn = _RecordedGather(name, steps, group)
        undo.callback(setattr, part, "dist_sync_fn", None)


def advice_for(difference: str) -> str:
    """Return what to do about a `difference` between what ranks have synchronized."""
    by_kind = {_SYNCHRONIZES: _EVERY_METRIC, "sync_dist=True": EVERY_RANK}
    return " ".join(advice for what, advice in by_kind.items() if what in difference) or EVERY_RANK


class _RecordedGather:
    """Gathers the states of a metric as torchmetrics does, and records this. Copies and pickles as the plain function.

    Args:
        name: the name of the metric in the module.
        steps: where it is recorded.
        group: the group for states on the CPU; `None` for the group that torchmetrics passes.
    """

    def __init__(self, name: str, steps: LoggedSteps, group: dist.ProcessGroup | None) -> None:
        self._what = f"called or computed the metric {name!r}{_SYNCHRONIZES}"
        self._steps = steps
        self._group = group

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Return the state of each rank. *Collective*."""
        self._steps.begin_reduction(self._what)
        try:
            on_cpu = tensor.device.type == "cpu"
            gathered: list[Tensor] = gather_all_tensors(tensor, group=self._group if on_cpu and self._group else group)
            return gathered
        finally:
            self._steps.end_reduction()

    def __deepcopy__(self, memo: Any) -> Any:
        """Return the plain function, because a copy of the metric may outlive the run."""
        return gather_all_tensors

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle as the plain function."""
        return _plain, ()


def _plain() -> Any:
    return gather_all_tensors
