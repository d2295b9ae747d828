"""Keep recomputation from updating buffers, such as the running means of BatchNorm, a second time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.torch.autograd import version_of
from lightning_paral.compat.torch.modules import own_buffers

_LARGE_NUMEL = 2**20


class RecomputedBuffers:
    """Restores the buffers of a unit after its forward pass has run again, so that they are updated once per step.

    `contexts` is the `context_fn` of `torch.utils.checkpoint.checkpoint`. Buffers with more than 2**20 elements are
    copied only if the first forward pass replaced them or changed them in place.

    Args:
        unit: the module that is recomputed.
    """

    def __init__(self, unit: Module) -> None:
        self._unit = unit

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the context of a forward pass, and that of its recomputations."""
        changed: set[tuple[Module, str]] = set()
        return self._find_changed(changed), _RestoredBuffers(self._unit, changed)

    @contextmanager
    def _find_changed(self, changed: set[tuple[Module, str]]) -> Iterator[None]:
        before = [
            (part, name, buffer, version_of(buffer)) for part, name, buffer in _buffers(self._unit) if _is_large(buffer)
        ]
        yield
        for part, name, buffer, version in before:
            if own_buffers(part).get(name) is not buffer or version_of(buffer) != version:
                changed.add((part, name))


class _RestoredBuffers(AbstractContextManager[None]):
    """A context that restores buffers at its end. It can be entered several times, one after the other."""

    def __init__(self, unit: Module, changed: set[tuple[Module, str]]) -> None:
        self._unit = unit
        self._changed = changed
        self._saved: list[tuple[Module, str, Tensor, Tensor]] = []

    def __enter__(self) -> None:
        self._saved = [
            (part, name, buffer, buffer.detach().clone())
            for part, name, buffer in _buffers(self._unit)
            if not _is_large(buffer) or (part, name) in self._changed
        ]

    def __exit__(self, *_: Any) -> None:
        with torch.no_grad():
            for part, name, buffer, value in self._saved:
                own_buffers(part)[name] = buffer
                buffer.data.copy_(value)  # `data`: the backward pass may have saved the buffer itself
        self._saved = []


def _buffers(unit: Module) -> Iterator[tuple[Module, str, Tensor]]:
    for part in unit.modules():
        for name, buffer in own_buffers(part).items():
            if buffer is not None and not buffer.is_inference():
                yield part, name, buffer


def _is_large(buffer: Tensor) -> bool:
    return buffer.numel() > _LARGE_NUMEL
