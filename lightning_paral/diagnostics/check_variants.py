"""What `check` changes in a module or in its sums, and what it looks for in a module."""

import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.torch.dispatch import TorchDispatchMode
from lightning_paral.compat.torch.normalization import BatchNorm

_aten = torch.ops.aten
_DROPOUT = re.compile("drop", re.IGNORECASE)


def remove_dropout(module: Module) -> None:
    """Set to 0 what a module keeps as a probability of dropout: `p` of dropout layers, and numbers named so."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            is_probability = _DROPOUT.search(name) or (name == "p" and _DROPOUT.search(type(part).__name__))
            if is_probability and isinstance(value, float):
                setattr(part, name, 0.0)


def find_batch_norms(module: Module) -> set[str]:
    """Return a sentence if layers of BatchNorm train, which normalize a rank's own samples."""
    names = [name for name, part in module.named_modules() if isinstance(part, BatchNorm) and part.training]
    return {f"BatchNorm ({names[0]}) normalizes the samples of each rank"} if names else set()


class ReorderedSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes matrix products and sums in the opposite order, which changes nothing but their rounding."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on operands that are flipped along the dimensions it sums over."""
        return func(*_flipped(func, args), **(kwargs or {}))


def _flipped(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if func in (_aten.mm.default, _aten.bmm.default):
        return _contracted(*args)
    if func in (_aten.addmm.default, _aten.baddbmm.default):
        return args[0], *_contracted(*args[1:3]), *args[3:]
    if func in (_aten.sum.dim_IntList, _aten.mean.dim) and args[1]:
        return args[0].flip(args[1]), *args[1:]
    if func in (_aten.sum.default, _aten.mean.default):
        return args[0].flatten().flip(0), *args[1:]
    if func is _aten.convolution.default and args[8] == 1:
        return args[0].flip(1), args[1].flip(1), *args[2:]
    if func is _aten.embedding_dense_backward.default:
        return args[0].flip(0), args[1].flip(0), *args[2:]
    return args


def _contracted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.flip(-1), b.flip(-2)
