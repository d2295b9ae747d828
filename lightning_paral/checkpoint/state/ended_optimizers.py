"""Optimizers after a run that divided their state: each rank keeps its part on the host, as flat ranges."""

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

from lightning_paral.checkpoint.layout import flat_range_of
from lightning_paral.checkpoint.shards import FlatShard, chunk_of_dtensor, flat, identity
from lightning_paral.checkpoint.state.optimizer import State, param_names
from lightning_paral.compat.torch.pytree import tree_map_only
from lightning_paral.errors import ConfigurationError

Names = list[list[str]]


class EndedOptimizers:
    """The optimizers of past fits, and the names of their parameters.

    The names are kept because a later evaluation may divide the module again, and put other parameters in their place.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Optimizer, Names] = WeakKeyDictionary()
        self._lost: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()

    def keep(self, optimizer: Optimizer, module: Module, state: State | None, parameters: Mapping[Any, Any]) -> None:
        """Give `optimizer` the parameters of the module as it is after the run, and the state that this rank holds.

        Args:
            optimizer: the user's.
            module: the module, as it is after the run.
            state: by number, as `Optimizer.state_dict` has it; `None` to keep what is in the optimizer.
            parameters: by parameter of the optimizer, the module's own; those that are the same are left out.
        """
        held = list(optimizer.state.items()) if state is None else _by_parameter(optimizer, state)
        for group in optimizer.param_groups:
            group["params"] = [parameters.get(parameter, parameter) for parameter in group["params"]]
        optimizer.state.clear()
        for parameter, values in held:
            optimizer.state[parameters.get(parameter, parameter)] = tree_map_only(Tensor, _on_host, values)
        self._names[optimizer] = param_names(optimizer, module)

    def lose(self, optimizer: Optimizer, reason: str) -> None:
        """Note that the state of `optimizer` was lost at the end of the run."""
        self._lost[optimizer] = reason

    def names(self, optimizer: Optimizer, module: Module) -> Names:
        """Return the names of the parameters of `optimizer`, by group.

        Raises:
            ConfigurationError: its state was lost at the end of the run.
        """
        if optimizer in self._lost:
            raise ConfigurationError(
                f"The optimizer's state can be saved during trainer.fit only: {self._lost[optimizer]}. Use "
                "ModelCheckpoint, or trainer.save_checkpoint(path, weights_only=True)."
            )
        return self._names.get(optimizer) or param_names(optimizer, module)


def _by_parameter(optimizer: Optimizer, state: State) -> list[tuple[Parameter, dict[str, Any]]]:
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(in_order[number], values) for number, values in state["state"].items()]


def _on_host(value: Tensor) -> Tensor:
    """Return what this rank holds of `value` on the host: all of it as a plain tensor, or a run."""
    if isinstance(value, FlatShard):
        return _run(value, value.start, value.read())
    if not isinstance(value, DTensor):
        return value.detach().cpu()
    chunk = chunk_of_dtensor(value)
    coordinate = value.device_mesh.get_coordinate()
    if chunk is None or coordinate is None:
        return _run(value, 0, torch.empty(0, dtype=value.dtype))
    span = flat_range_of(value.shape, chunk) if chunk.numel else (0, 0)
    if span is None:
        return value.detach()  # divided by the user, in another way than FSDP
    replica = any(n for n, placement in zip(coordinate, value.placements, strict=True) if placement.is_replicate())
    local = flat(value.to_local())
    return _run(value, span[0], local[:0] if replica else local)


def _run(value: Tensor, start: int, held: Tensor) -> Tensor:
    held = held.detach().cpu()
    if held.numel() == value.numel() and dist.is_initialized() and dist.get_world_size() == 1:
        return held.view(value.shape)
    return FlatShard(value.shape, value.dtype, start, held.numel(), partial(identity, held))


def gather_full_tensor(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `value` in its own shape, on the host. *Collective* over the world if it is a run.

    Args:
        value: what `EndedOptimizers` keeps of a tensor.
        device: one that collectives can work on.
    """
    if not isinstance(value, FlatShard):
        return value.clone()
    values = torch.zeros(value.numel(), dtype=value.dtype, device=device)
    values[value.start : value.start + value.local_numel] = value.read().to(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)  # each element is held by one rank
    return values.cpu().view(value.shape)
