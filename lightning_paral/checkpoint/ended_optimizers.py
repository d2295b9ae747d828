"""Optimizers after a run that sharded their state: each rank keeps its shards on the host as `FlatShard`."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.checkpoint.optimizer_state import State, param_names
from lightning_paral.checkpoint.shards import FlatShard, identity, is_sharded, local_shard
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.errors import ConfigurationError

Names = list[list[str]]
"""The names of the parameters in each group of an optimizer."""


class EndedOptimizers:
    """Prepares optimizers for the time after a run, and keeps the names of their parameters.

    The names are kept because a later evaluation may shard the module again and replace its parameters. They can then
    no longer be looked up in the module.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Optimizer, Names] = WeakKeyDictionary()
        self._lost: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()

    def keep(self, optimizer: Optimizer, module: Module, state: State | None, parameters: Mapping[Any, Any]) -> None:
        """Give `optimizer` the parameters that the module has after the run, and this rank's shards of its state.

        Args:
            optimizer: the user's optimizer.
            module: the module after the run.
            state: the state with int keys, as `Optimizer.state_dict` returns it; `None` keeps the current state of
                `optimizer`.
            parameters: maps parameters of the optimizer to those of the module; those that are the same may be absent.
        """
        local = dict(optimizer.state)
        if state is not None:
            in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            local = {in_order[number]: values for number, values in state["state"].items()}
        for group in optimizer.param_groups:
            group["params"] = [parameters.get(parameter, parameter) for parameter in group["params"]]
        optimizer.state.clear()
        for parameter, values in local.items():
            optimizer.state[parameters.get(parameter, parameter)] = tree_map_only(Tensor, _on_host, values)
        self._names[optimizer] = param_names(optimizer, module)

    def lose(self, optimizer: Optimizer, reason: str) -> None:
        """Record that the state of `optimizer` was lost at the end of the run, and why."""
        self._lost[optimizer] = reason

    def why_lost(self, optimizer: Optimizer) -> str | None:
        """Return why the state of `optimizer` was lost at the end of a run; `None` if it was not."""
        return self._lost.get(optimizer)

    def names(self, optimizer: Optimizer, module: Module) -> Names:
        """Return the names of the parameters of `optimizer`, one list per group.

        Raises:
            ConfigurationError: the state of the optimizer was lost at the end of the run.
        """
        if optimizer in self._lost:
            raise ConfigurationError(
                f"The optimizer's state can be saved only during trainer.fit: {self._lost[optimizer]}. Use "
                "ModelCheckpoint, or trainer.save_checkpoint(path, weights_only=True)."
            )
        return self._names.get(optimizer) or param_names(optimizer, module)


def _on_host(value: Tensor) -> Tensor:
    """Return this rank's elements of `value` on the host, as a plain tensor or a `FlatShard`."""
    if not is_sharded(value):
        return value.detach().cpu()
    shard = local_shard(value)  # of a DTensor, only the first replica has elements, which a gather adds up
    local = shard.values().detach().to("cpu", value.dtype)
    if local.numel() == value.numel() and dist.is_initialized() and dist.get_world_size() == 1:
        return local.view(value.shape)
    if isinstance(value, FlatShard):
        start, chunk = value.start, value.local_chunk
    else:
        start, chunk = 0, next(iter(shard.chunks), None)
    values = partial(identity, local)
    return FlatShard(value.shape, value.dtype, start, local.numel(), values, local_chunk=chunk)
