"""Optimizers after a run that sharded their state: each rank keeps its shards on the host as flat ranges."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.checkpoint.dtensor_chunks import chunk_of_dtensor, writes_chunk
from lightning_paral.checkpoint.layout import Chunk, flat_range_of
from lightning_paral.checkpoint.optimizer_state import State, param_names
from lightning_paral.checkpoint.shards import FlatShard, flat, identity
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
        local = list(optimizer.state.items()) if state is None else _by_parameter(optimizer, state)
        for group in optimizer.param_groups:
            group["params"] = [parameters.get(parameter, parameter) for parameter in group["params"]]
        optimizer.state.clear()
        for parameter, values in local:
            optimizer.state[parameters.get(parameter, parameter)] = tree_map_only(Tensor, _on_host, values)
        self._names[optimizer] = param_names(optimizer, module)

    def lose(self, optimizer: Optimizer, reason: str) -> None:
        """Record that the state of `optimizer` was lost at the end of the run, and why."""
        self._lost[optimizer] = reason

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


def _by_parameter(optimizer: Optimizer, state: State) -> list[tuple[Parameter, dict[str, Any]]]:
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(in_order[number], values) for number, values in state["state"].items()]


def _on_host(value: Tensor) -> Tensor:
    """Return this rank's elements of `value` on the host, as a plain tensor or a `FlatShard`."""
    if isinstance(value, FlatShard):
        return _flat_shard(value, value.start, value.read(), value.local_chunk)
    if not isinstance(value, DTensor):
        return value.detach().cpu()
    chunk = chunk_of_dtensor(value)
    # Only the first replica keeps its elements, because `gather_full_tensor` adds up the shards of all ranks.
    if chunk is None or chunk.numel == 0 or not writes_chunk(value):
        return _flat_shard(value, 0, torch.empty(0, dtype=value.dtype))
    flat_range = flat_range_of(value.shape, chunk)
    start, chunk = (0, chunk) if flat_range is None else (flat_range[0], None)
    return _flat_shard(value, start, flat(value.to_local()), chunk)


def _flat_shard(value: Tensor, start: int, local: Tensor, chunk: Chunk | None = None) -> Tensor:
    local = local.detach().cpu()
    if local.numel() == value.numel() and dist.is_initialized() and dist.get_world_size() == 1:
        return local.view(value.shape)
    return FlatShard(value.shape, value.dtype, start, local.numel(), partial(identity, local), local_chunk=chunk)


def gather_full_tensor(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy of the full tensor on the host, in the same dtype. *Collective* over the world for a `FlatShard`.

    Args:
        value: a tensor from the state of an optimizer that was passed to `EndedOptimizers.keep`.
        device: a device that the backend of the process group supports.
    """
    if not isinstance(value, FlatShard):
        return value.clone()
    values = torch.zeros(value.numel(), dtype=value.dtype, device=device)
    if value.local_chunk is None:
        values[value.start : value.start + value.local_numel] = value.read().to(device)
    else:
        values.view(value.shape)[value.local_chunk.index] = value.read().to(device).view(value.local_chunk.sizes)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)  # for each element, all ranks but one have zero
    return values.cpu().view(value.shape)
