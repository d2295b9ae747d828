"""torchmetrics in replicas: updates of a replica's copy of a metric are repeated on the master's metric.

The master is the module that the user passed to the Trainer.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric, MetricCollection

from lightning_paral.compat.torch.tensors import tree_leaves


def is_metric(module: object) -> bool:
    """Return whether `module` is a metric, which `MetricCopies` copies."""
    return isinstance(module, Metric | MetricCollection)


class MetricCopies:
    """Copies of the master's metrics for one replica. They are reset before each step, and record their updates.

    The states of the copies of a metric cannot always be merged: some can be joined only by `compute`, and cannot be
    updated afterwards. Updating the master's metric with the same arguments, replica by replica, always works.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[Module, Module]] = {}  # by id, because a metric's hash changes with its state
        self._originals: dict[int, Module] = {}
        self._updates: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._depth = 0

    def copy_of(self, metric: Module) -> Module:
        """Reset and return this replica's copy of `metric`, which is the same object in every step."""
        if id(metric) not in self._copies:
            self._copies[id(metric)] = (metric, self._new_copy(metric))
        copy: Any = self._copies[id(metric)][1]
        copy.reset()
        copy.train(metric.training)
        return copy  # type: ignore[no-any-return]

    def original_of(self, value: object) -> object:
        """Return the master's metric if `value` is a copy of it; otherwise `value`."""
        return self._originals.get(id(value), value)

    def replay(self, device: torch.device) -> None:
        """Repeat the updates of the copies, in order, on the master's metrics, which are on `device`."""
        updates, self._updates = self._updates, []
        for metric, args, kwargs in updates:
            metric.update(*_detach_on(args, device), **_detach_on(kwargs, device))

    def forget(self) -> None:
        """Discard the updates of a step in which a replica failed."""
        self._updates = []
        self._depth = 0

    def _new_copy(self, metric: Any) -> Module:
        copy = deepcopy(metric, _make_detached_memo(metric)).to(self._device)
        for original, part in zip(metric.modules(), copy.modules(), strict=True):
            self._originals[id(part)] = original
            if is_metric(part):
                part.update = self._record_updates(original, part.update)
                part.forward = self._record_updates(original, part.forward)
        return copy  # type: ignore[no-any-return]

    def _record_updates(self, original: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `method` that records its arguments, unless another such method called it."""

        def record(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                self._updates.append((original, args, kwargs))
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1

        return record


def _detach_on(arguments: Any, device: torch.device) -> Any:
    return move_data_to_device(apply_to_collection(arguments, Tensor, Tensor.detach), device)


def _make_detached_memo(metric: Module) -> dict[int, Any]:
    """Return a memo that makes `deepcopy` detach the tensors of `metric` that are part of a graph.

    `deepcopy` refuses such tensors, which differentiable metrics hold.
    """
    leaves = [leaf for part in metric.modules() for leaf in tree_leaves(dict(vars(part)))]
    return {id(leaf): leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_leaf}
