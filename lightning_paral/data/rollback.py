"""Undo the side effects of a step on a module, such as of a padding batch, whose results are discarded."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.deepspeed.engine import is_zero_attribute
from lightning_paral.compat.torch.modules import own_buffers
from lightning_paral.compat.torch.tensors import WithoutMemory
from lightning_paral.distributed.rng_state import global_states, set_global_states
from lightning_paral.model.gradients import local_part

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
    try:
        with rollback_attributes(module.modules()):
            yield
    finally:
        set_global_states(host_states)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)


@contextmanager
def rollback_attributes(modules: Iterable[Module]) -> Iterator[None]:
    """Undo what the block does to attributes of `modules`, not counting their submodules."""
    undo: list[Callable[[], None]] = []
    for part in modules:
        attributes = user_attributes(part)
        undo += [partial(_set_attributes, part, attributes), _restorer(attributes), _restorer(own_buffers(part))]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def user_attributes(module: Module) -> dict[str, Any]:
    """Return the attributes of `module` except for those of torch and of engines, such as `_parameters`."""
    return {name: module.__dict__[name] for name in _names(module.__dict__)}


def _names(attributes: dict[str, Any]) -> list[str]:
    return [name for name in attributes if name not in _TORCH_ATTRIBUTES and not is_zero_attribute(name)]


def _set_attributes(module: Module, attributes: dict[str, Any]) -> None:
    for name in set(_names(module.__dict__)) - set(attributes):
        del module.__dict__[name]
    module.__dict__.update(attributes)


def _restorer(value: Any) -> Callable[[], None]:
    """Return a function that restores a tensor in place, or a container and its items at any depth."""
    if isinstance(value, Tensor):  # asked first: whether something is a `Parameter` takes longer
        if isinstance(value, Parameter | WithoutMemory):
            return _do_nothing  # engines keep lists of parameters, which they unshard and free
        return partial(_copy_changed, value, value.detach().clone())
    if not isinstance(value, dict | list | deque | tuple | set):
        return _do_nothing
    items = copy.copy(value)
    # Tensors in lists are not copied: they are collected outputs and states, often many, and not changed in place.
    inside = value.values() if isinstance(value, dict) else (each for each in value if not isinstance(each, Tensor))
    undo = [_restorer(each) for each in inside]

    def restore() -> None:
        if not isinstance(value, tuple):
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(items)
        for each in undo:
            each()

    return restore


def _copy_changed(value: Tensor, before: Tensor) -> None:
    # Of a DTensor this rank's part: comparing the whole is a collective, which other ranks may not join.
    ours, kept = local_part(value.detach()), local_part(before)
    if not torch.equal(ours, kept):
        ours.copy_(kept)


def _do_nothing() -> None:
    pass
