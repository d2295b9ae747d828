"""Padding batches: a rank without data runs them to join the other ranks' collectives; side effects are rolled back."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.modules import own_buffers
from lightning_paral.distributed.rng_state import global_states, set_global_states
from lightning_paral.model.engine_attributes import describes_shards

# Attributes that `Module.__init__` creates. Apart from buffers, torch and the engines change them, not the step.
_TORCH_ATTRIBUTES = set(vars(Module()))


@dataclass(frozen=True)
class PaddingBatch:
    """A batch, or a sample of one, that only keeps the number of steps equal on all ranks. It is not counted."""

    batch: Any


@dataclass(frozen=True)
class MaybeUneven:
    """A batch of a step in which another rank may have a padding batch."""

    batch: Any


class CollatePadding:
    """Wraps a `collate_fn`, so that padding samples become a padding batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Return the batch of `samples`; with `batch_size=None`, of a single sample."""
        if isinstance(samples, PaddingBatch):
            return PaddingBatch(self.collate(samples.batch))
        if isinstance(samples, list) and samples and isinstance(samples[0], PaddingBatch):
            return PaddingBatch(self.collate([sample.batch for sample in samples]))
        return self.collate(samples)


def mark_maybe_uneven(batches: Iterator[Any], restart: object = None) -> Iterator[Any]:
    """Yield `batches`, each marked `MaybeUneven` unless it is padding: where a stream ends is not known beforehand."""
    for batch in batches:
        yield batch if isinstance(batch, PaddingBatch) else MaybeUneven(batch)


def strip_padding(batches: Iterator[Any], restart: object = None) -> Iterator[Any]:
    """Yield `batches` without padding batches, the others without their marks."""
    for batch in batches:
        if not isinstance(batch, PaddingBatch):
            yield batch.batch if isinstance(batch, MaybeUneven) else batch


@contextmanager
def rollback_side_effects(module: Module) -> Iterator[None]:
    """Roll back what the block does to the random generators and to attributes of `module` and its submodules.

    Restores the values of buffers, of tensors among the attributes and of torchmetrics' states, and the items of
    lists, dicts, sets and deques at any depth. Parameters are left alone: evaluation does not change them, engines do.
    """
    host_states = global_states()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    attributes = [
        (each.__dict__, _user_attributes(each), _snapshot(_user_attributes(each))) for each in module.modules()
    ]
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


def _user_attributes(module: Module) -> dict[str, Any]:
    return {name: module.__dict__[name] for name in _names(module.__dict__)}


def _names(attributes: dict[str, Any]) -> list[str]:
    return [name for name in attributes if name not in _TORCH_ATTRIBUTES and not describes_shards(name)]


def _snapshot(value: Any) -> Any:
    """Copy what can change in place: tensors and containers, down to their items. `None` for anything else."""
    if isinstance(value, Parameter):
        return None  # engines keep lists of parameters, and unshard and free them
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _snapshot(item) for key, item in value.items()}, copy.copy(value)
    if isinstance(value, list | deque | tuple):
        # Tensors in lists are collected outputs and states: many, and not changed in place. So they are not copied.
        return [None if isinstance(item, Tensor) else _snapshot(item) for item in value], list(value)
    if isinstance(value, set):
        return set(value)
    return None


def _restore(value: Any, kept: Any) -> None:
    """Restore `value` in place to its state when `kept = _snapshot(value)` was called."""
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
