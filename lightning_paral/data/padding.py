"""Steps that a rank runs only for the sake of the others' collectives, and that leave no trace."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.deepspeed.modules import is_of_division
from lightning_paral.compat.torch.modules import own_buffers

# What `Module.__init__` makes, apart from buffers, belongs to torch and to the engines, not to the step.
_OF_TORCH = set(vars(Module()))


@dataclass(frozen=True)
class PaddingBatch:
    """A batch, or a sample of one, that is there only so that all ranks take the same number of steps."""

    batch: Any


@dataclass(frozen=True)
class MaybeUneven:
    """A batch of a step in which another rank may have a filler."""

    batch: Any


class CollatePadding:
    """Collates as before, but samples that are fillers become a batch that is one."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Return the batch of `samples`; of a single one, where the loader has `batch_size=None`."""
        if isinstance(samples, PaddingBatch):
            return PaddingBatch(self.collate(samples.batch))
        if isinstance(samples, list) and samples and isinstance(samples[0], PaddingBatch):
            return PaddingBatch(self.collate([sample.batch for sample in samples]))
        return self.collate(samples)


@contextmanager
def rollback_side_effects(module: Module) -> Iterator[None]:
    """Undo what the code inside does to random generators, and to attributes of `module` and its submodules.

    Buffers and other tensors get back their values, the states of torchmetrics included; lists, dicts, sets and deques
    get back their items, at any depth. Parameters are left alone: evaluation does not change them, engines do.
    """
    states = _random_states()
    attributes = [(each.__dict__, _own(each), _keep(_own(each))) for each in module.modules()]
    of_modules = [own_buffers(each) for each in module.modules()]
    buffers = [(current, dict(current), _keep(current)) for current in of_modules]
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
        _set_random_states(states)


def _own(module: Module) -> dict[str, Any]:
    return {name: module.__dict__[name] for name in _names(module.__dict__)}


def _names(attributes: dict[str, Any]) -> list[str]:
    return [name for name in attributes if name not in _OF_TORCH and not is_of_division(name)]


def _keep(value: Any) -> Any:
    """Copy what can change in place: tensors and containers, down to their items."""
    if isinstance(value, Parameter):
        return None  # engines keep lists of those, and gather and free them
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _keep(item) for key, item in value.items()}, copy.copy(value)
    if isinstance(value, list | deque | tuple):
        # Tensors in lists are outputs and states that were collected: nobody changes them in place, and they are many.
        return [None if isinstance(item, Tensor) else _keep(item) for item in value], list(value)
    if isinstance(value, set):
        return set(value)
    return None


def _restore(value: Any, kept: Any) -> None:
    """Give `value` its state of when `kept = _keep(value)`, in place."""
    if kept is None:
        return
    if isinstance(value, Tensor):
        if not torch.equal(value, kept):
            value.detach().copy_(kept)
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


def _random_states() -> tuple[Any, ...]:
    on_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return torch.get_rng_state(), on_cuda, np.random.get_state(), random.getstate()


def _set_random_states(states: tuple[Any, ...]) -> None:
    of_torch, on_cuda, of_numpy, of_random = states
    torch.set_rng_state(of_torch)
    if on_cuda is not None:
        torch.cuda.set_rng_state(on_cuda)
    np.random.set_state(of_numpy)
    random.setstate(of_random)
