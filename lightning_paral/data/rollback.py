"""Undo the side effects of a step on a module, such as of a padding batch, whose results are discarded."""

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.modules import own_buffers
from lightning_paral.compat.torch.tensors import WithoutMemory
from lightning_paral.distributed.rng_state import global_states, set_global_states
from lightning_paral.model.clipping import local_part
from lightning_paral.model.engine_attributes import describes_shards

# Attributes that `Module.__init__` creates. Except for buffers, only torch and the engines change them, not a step.
_TORCH_ATTRIBUTES = set(vars(Module()))


@contextmanager
def rollback_side_effects(module: Module) -> Iterator[None]:
    """Undo what the block does to the random generators and to attributes of `module` and its submodules.

    This restores the values of buffers, of attributes that are tensors and of torchmetrics' states, and the items of
    lists, dicts, sets and deques at any depth. It does not restore parameters: only engines change them in evaluation.
    """
    host_states = global_states()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    attributes = [(each.__dict__, user_attributes(each), _snapshot(user_attributes(each))) for each in module.modules()]
    module_buffers = [own_buffers(each) for each in module.modules()]
    buffers = [(current, dict(current), _snapshot(current)) for current in module_buffers]
    try:
        yield
    finally:
        for current, before, kept in attributes:
            for name in set(_names(current)) - set(before):
                del current[name]
            current.update(before)
            _restore(before, kept)
        for current, before, kept in buffers:
            current.clear()
            current.update(before)
            _restore(before, kept)
        set_global_states(host_states)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)


def user_attributes(module: Module) -> dict[str, Any]:
    """Return the attributes of `module` except for those of torch and of engines, such as `_parameters`."""
    return {name: module.__dict__[name] for name in _names(module.__dict__)}


def _names(attributes: dict[str, Any]) -> list[str]:
    return [name for name in attributes if name not in _TORCH_ATTRIBUTES and not describes_shards(name)]


def _snapshot(value: Any) -> Any:
    """Return a copy of a tensor, or of a container and its items at any depth; `None` for any other value."""
    if isinstance(value, Parameter | WithoutMemory):
        return None  # engines keep lists of parameters, which they unshard and free
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _snapshot(item) for key, item in value.items()}, copy.copy(value)
    if isinstance(value, list | deque | tuple):
        # Tensors in lists are not copied: they are collected outputs and states, often many, and not changed in place.
        return [None if isinstance(item, Tensor) else _snapshot(item) for item in value], list(value)
    if isinstance(value, set):
        return set(value)
    return None


def _restore(value: Any, kept: Any) -> None:
    """Restore `value` in place to its state at the time of `kept = _snapshot(value)`."""
    if kept is None:
        return
    if isinstance(value, Tensor):
        # Of a DTensor this rank's part: comparing the whole is a collective, which other ranks may not join.
        ours, before = local_part(value.detach()), local_part(kept)
        if not torch.equal(ours, before):
            ours.copy_(before)
    elif isinstance(value, dict):
        states, items = kept
        value.clear()
        value.update(items)
        for key, state in states.items():
            _restore(items[key], state)
    elif isinstance(value, list | deque | tuple):
        states, items = kept
        if not isinstance(value, tuple):
            value.clear()
            value.extend(items)
        for item, state in zip(items, states, strict=True):
            _restore(item, state)
    elif isinstance(value, set):
        value.clear()
        value.update(kept)
