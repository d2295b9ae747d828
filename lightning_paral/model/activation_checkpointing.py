"""Activation checkpointing: free a unit's activations after its forward, recompute them in the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from lightning_paral.compat.torch.modules import own_buffers
from lightning_paral.compat.torch.tensors import tree_leaves
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.units import choose_units
from lightning_paral.options import ActivationCheckpointing


def checkpoint_units(root: Module, options: ActivationCheckpointing) -> Callable[[], None]:
    """Make each unit of `root` save only its inputs, and recompute its activations in the backward pass.

    It replaces `forward` on each instance; names, classes and hooks of the modules do not change.

    Args:
        root: the module that contains the units.
        options: which units to checkpoint, and where to keep their inputs.

    Returns:
        A function that undoes the change.

    Raises:
        ConfigurationError: no unit is found, or one contains another.
    """
    units = choose_units(root, options.units).inner
    if not units:
        raise ConfigurationError(
            f"activation_checkpointing finds no repeated blocks in {type(root).__name__}. Name the classes whose "
            "activations are to be recomputed: ActivationCheckpointing(units=['Block'])."
        )
    for outer, inner in permutations(units, 2):
        if inner.name.startswith(f"{outer.name}."):
            raise ConfigurationError(
                f"activation_checkpointing chooses {outer.name!r} and {inner.name!r} inside it, which would be "
                "computed three times. Choose one of the two."
            )
    for unit in units:
        _checkpoint(unit.module, options.offload_to_cpu)

    def undo() -> None:
        for unit in units:
            vars(unit.module).pop("forward", None)

    return undo


def _without_cache(module: Module, value: Any) -> Any:
    """Return `None` for an empty cache of Transformers, to which the second forward pass would append, else `value`.

    Transformers' own gradient checkpointing does the same.

    Raises:
        ConfigurationError: `value` is a cache that already has positions for `module`, which uses them.
    """
    if all(cls.__module__ != "transformers.cache_utils" for cls in type(value).__mro__):
        return value
    layers = (getattr(part, "layer_idx", None) for part in module.modules())
    num_positions = value.get_seq_length(next((layer for layer in layers if layer is not None), 0))
    if num_positions:
        raise ConfigurationError(
            f"{type(module).__name__} gets a cache with {num_positions} positions in a training step, as in prefix "
            "tuning. With activation_checkpointing, its second forward pass would append to the cache. Train without "
            "activation_checkpointing, or without the cache."
        )
    return None


def _checkpoint(module: Module, offload_to_cpu: bool) -> None:
    forward = module.forward

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args = tuple(_without_cache(module, each) for each in args)
        kwargs = {name: _without_cache(module, each) for name, each in kwargs.items()}
        # `save_on_cpu` keeps CPU tensors themselves, and would hide a change in place from autograd. It sees only the
        # unit's inputs: `checkpoint` has its own hooks for tensors saved inside the unit.
        offloads = offload_to_cpu and any(
            isinstance(each, Tensor) and each.is_cuda for each in tree_leaves((args, kwargs))
        )
        with save_on_cpu(pin_memory=True) if offloads else nullcontext():
            # torch.compile does not trace a `context_fn`, and updates buffers once by itself.
            if torch.compiler.is_compiling() or next(module.buffers(), None) is None:
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            buffers = RecomputedBuffers(module)
            contexts = buffers.recording(), buffers
            return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)

    module.forward = recomputed


class _Buffer(NamedTuple):
    owner: Module
    name: str
    tensor: Tensor
    value: Tensor


class RecomputedBuffers(AbstractContextManager[None]):
    """A context of recomputations. They begin with the buffers of the forward pass; after it, buffers are as before it.

    It can be entered several times, one after the other.

    Args:
        unit: the module that is recomputed.
    """

    def __init__(self, unit: Module) -> None:
        self._unit = unit
        self._before_forward: list[_Buffer] = []
        self._saved: list[_Buffer] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the buffers before the forward pass, which runs inside the block."""
        self._before_forward = self._buffers()
        yield

    def __enter__(self) -> None:
        self._saved = self._buffers()
        self._put_in(self._before_forward)

    def __exit__(self, *_: Any) -> None:
        self._put_in(self._saved)
        self._saved = []

    def _buffers(self) -> list[_Buffer]:
        return [
            _Buffer(part, name, buffer, buffer.detach().clone())
            for part in self._unit.modules()
            for name, buffer in own_buffers(part).items()
            if buffer is not None and not buffer.is_inference()
        ]

    @torch.no_grad()
    def _put_in(self, buffers: list[_Buffer]) -> None:
        for owner, name, tensor, value in buffers:
            own_buffers(owner)[name] = tensor
            if tensor.layout is not torch.strided or 0 not in tensor.stride():  # no code can write an expanded one
                tensor.data.copy_(value)  # `data`: the backward pass may have saved the buffer itself
