"""Update torchmetrics as one process would, in a step in which ranks have different numbers of samples, or none."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import MeanMetric, Metric, MetricCollection

from lightning_paral.compat.lightning.metrics import set_computed, set_value_of_step
from lightning_paral.data.padding import rollback_side_effects, user_attributes
from lightning_paral.data.uneven_results import list_states

_Metric = Metric | MetricCollection
_MOST_ITEMS = 256  # of a list that may contain metrics; longer ones are collected outputs


def find_metrics(roots: Iterable[object]) -> list[_Metric]:
    """Return the metrics in modules and callbacks, in their submodules, and in lists and dicts that they have."""
    return list({id(metric): metric for root in roots for metric in _metrics_in(root)}.values())


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
                _replace(metric, "update", _weighted_update(metric.update, weight), undo)
        return
    running: list[_Metric] = []
    for metric in metrics:
        _replace(metric, "update", _without_effect(metric, metric.update, running), undo)
        # With `dist_sync_on_step`, `forward` computes over all ranks, so that only its updates must have no effect.
        if isinstance(metric, Metric) and not metric.dist_sync_on_step:
            _replace(metric, "forward", _without_effect(metric, metric.forward, running, is_forward=True), undo)


def keep_steps_local(metrics: Iterable[_Metric], undo: ExitStack) -> None:
    """Make `forward` of `metrics` return the value of this rank, also with `dist_sync_on_step`, until `undo` is closed.

    Call this in a step in which other ranks may have no batch, so that they would not join the synchronization.
    """
    for metric in metrics:
        if isinstance(metric, Metric) and metric.dist_sync_on_step:
            metric.dist_sync_on_step = False
            undo.callback(setattr, metric, "dist_sync_on_step", True)


def _metrics_in(root: object) -> Iterator[_Metric]:
    for part in root.modules() if isinstance(root, Module) else (root,):
        if isinstance(part, _Metric):
            yield part
        # Reading an item of `_parameters` would gather it under ZeRO-3.
        for value in list((user_attributes(part) if isinstance(part, Module) else vars(part)).values()):
            for item in _items(value):
                if isinstance(item, _Metric):
                    yield from (each for each in item.modules() if isinstance(each, _Metric))


def _items(value: object) -> Iterable[object]:
    if not isinstance(value, list | tuple | dict):
        return (value,)
    if len(value) > _MOST_ITEMS:
        return ()
    return value.values() if isinstance(value, dict) else value


def _replace(metric: _Metric, name: str, method: Callable[..., Any], undo: ExitStack) -> None:
    attributes = vars(metric)
    if name in attributes:
        undo.callback(attributes.__setitem__, name, attributes[name])
    else:
        undo.callback(attributes.pop, name, None)
    attributes[name] = method


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
        parts = [part for part in metric.modules() if isinstance(part, Metric)]
        running.append(metric)
        try:
            with rollback_side_effects(metric):
                value = call(*args, **kwargs)
                item_types = [list_states(part) for part in parts]
        finally:
            running.clear()
        for part, types in zip(parts, item_types, strict=True):
            set_computed(part, None)  # other ranks have updated theirs, and will compute again
            for state, (dtype, shape) in types.items():
                if getattr(part, state) == []:
                    # torchmetrics gathers an empty list as a 1-d fp32 tensor.
                    setattr(part, state, [torch.empty(0, *shape, dtype=dtype, device=part.device)])
        if is_forward and isinstance(metric, Metric):
            set_value_of_step(metric, value)
        return value

    return call_and_restore
