"""Update and gather torchmetrics as one process would, where ranks have different numbers of samples, or none."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torchmetrics import MeanMetric, Metric, MetricCollection

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.lightning.results import replace_gathering, set_computed, set_value_of_step
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.data.rollback import rollback_side_effects, user_attributes
from lightning_paral.distributed.exchange import gather_objects
from lightning_paral.distributed.mesh import ParallelDims

_Metric = Metric | MetricCollection
_MOST_ITEMS = 256  # of a list that may contain metrics; longer ones are collected outputs


def find_metrics(roots: Iterable[object]) -> list[_Metric]:
    """Return the metrics in modules and callbacks, in their submodules, and in lists and dicts that they have."""
    return list({id(metric): metric for root in roots for metric in _metrics_in(root)}.values())


def metrics_of_run(trainer: Trainer) -> list[_Metric]:
    """Return the metrics of the module and the callbacks."""
    return find_metrics((trainer.lightning_module, *vars(trainer)["callbacks"]))


def change_updates(metrics: Iterable[_Metric], weight: float, undo: ExitStack) -> None:
    """Change what updates of `metrics` do, until `undo` is closed.

    If this rank has no sample and runs a repeated one, updates have no effect. Otherwise a `MeanMetric` that is updated
    with one number, such as a mean loss, weights it by this rank's number of samples.

    Args:
        metrics: the metrics.
        weight: this rank's number of samples, divided by the mean number of all data ranks.
        undo: a stack to which functions that undo the changes are pushed.
    """
    if weight:
        for metric in metrics:
            if isinstance(metric, MeanMetric):
                shadow_method(metric, "update", _weighted_update(metric.update, weight), undo)
        return
    running: list[_Metric] = []
    for metric in metrics:
        shadow_method(metric, "update", _without_effect(metric, metric.update, running), undo)
        # With `dist_sync_on_step`, `forward` computes over all ranks, so that only its updates must have no effect.
        if isinstance(metric, Metric) and not metric.dist_sync_on_step:
            shadow_method(metric, "forward", _without_effect(metric, metric.forward, running, is_forward=True), undo)


def gather_over_data_ranks(dims: ParallelDims, undo: ExitStack) -> None:
    """Change how all metrics synchronize, until `undo` is closed.

    Metrics that have no process group synchronize over the data ranks. List states become the list that one process
    would have after the samples of each rank in turn, also if ranks have different numbers of items, or none.
    torchmetrics gathers a list item by item, so ranks would wait for items that the others do not have.
    """
    data_group = dims.data_group()  # on all ranks, because it may have to be created

    def gather(metric: Metric, gather_tensors: Callable[..., None], gather_tensor: Any, process_group: Any) -> None:
        group = process_group or metric.process_group or data_group
        lists = {name: state for name, state in metric.metric_state.items() if isinstance(state, list)}
        by_rank = []
        if lists:
            # Cloned, because pickling a view, such as a row of a batch, would send all of its storage.
            on_host = apply_to_collection(lists, Tensor, lambda tensor: tensor.detach().cpu().clone())
            device = torch.device("cpu") if metric.compute_on_cpu else metric.device
            by_rank = [move_data_to_device(theirs, device) for theirs in gather_objects(on_host, group)]
            by_rank[dist.get_rank(group)] = lists  # which may be part of a graph
        for name in lists:
            setattr(metric, name, [])
        gather_tensors(gather_tensor, process_group=group)
        for name in lists:
            setattr(metric, name, [item for states in by_rank for item in states[name]])

    undo.callback(replace_gathering(gather))


def keep_steps_local(metrics: Iterable[_Metric], undo: ExitStack) -> None:
    """Make metrics compute the value of this rank, until `undo` is closed; `metrics` then forget it.

    Call this in a step in which other ranks may have no batch, so that they would not join the synchronization.
    """
    undo.callback(replace_attributes(Metric, dict.fromkeys(("sync", "unsync"), _do_nothing)))
    for metric in metrics:
        if isinstance(metric, Metric):
            undo.callback(set_computed, metric, None)


def _metrics_in(root: object) -> Iterator[_Metric]:
    for part in root.modules() if isinstance(root, Module) else (root,):
        if isinstance(part, _Metric):
            yield part
        # Reading an item of `_parameters` would gather it under ZeRO-3.
        for value in list((user_attributes(part) if isinstance(part, Module) else vars(part)).values()):
            for item in _items(value):
                if isinstance(item, _Metric):
                    yield from (each for each in item.modules() if isinstance(each, _Metric))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _items(value: object) -> Iterable[object]:
    if not isinstance(value, list | tuple | dict):
        return (value,)
    if len(value) > _MOST_ITEMS:
        return ()
    return value.values() if isinstance(value, dict) else value


def _weighted_update(update: Callable[..., None], share: float) -> Callable[..., None]:
    def update_weighted(value: Any, weight: Any = None) -> None:
        if weight is None and (not isinstance(value, Tensor) or value.ndim == 0):
            weight = share
        update(value) if weight is None else update(value, weight)

    return update_weighted


def _without_effect(
    metric: _Metric, call: Callable[..., Any], running: list[_Metric], is_forward: bool = False
) -> Callable[..., Any]:
    """Return a function that calls `call`, a method of `metric`, and restores the states of the metric afterwards."""

    def call_and_restore(*args: Any, **kwargs: Any) -> Any:
        if running:  # another metric, whose states are restored, calls this one
            return call(*args, **kwargs)
        running.append(metric)
        try:
            with rollback_side_effects(metric):
                value = call(*args, **kwargs)
        finally:
            running.clear()
        for part in metric.modules():
            if isinstance(part, Metric):
                set_computed(part, None)  # other ranks have updated theirs, and will compute again
        if is_forward and isinstance(metric, Metric):
            set_value_of_step(metric, value)
        return value

    return call_and_restore
