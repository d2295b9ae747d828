"""The functions of torch that act on each feature separately, in the forward pass and in the backward pass."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_UNARY = (
    *("relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "elu", "selu", "celu", "leaky_relu", "softplus", "mish"),
    *("hardswish", "hardsigmoid", "hardtanh", "logsigmoid", "softsign", "tanhshrink", "softshrink", "hardshrink"),
    *("threshold", "exp", "expm1", "log", "log1p", "neg", "negative", "abs", "sqrt", "rsqrt", "square", "sin", "cos"),
    *("erf", "reciprocal", "sign", "positive", "clamp", "clamp_min", "clamp_max", "clip", "nan_to_num"),
    *("__neg__", "__pos__", "__abs__"),
)
_CONVERSIONS = (*("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach"),)
_DROPOUT = ("dropout",)
_BINARY = (
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "pow", "float_power"),
    *("maximum", "minimum", "eq", "ne", "gt", "ge", "lt", "le"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__rdiv__"),
    *("__pow__", "__rpow__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"),
)
_HARMLESS = (
    *("dim", "ndimension", "is_floating_point", "is_complex", "is_contiguous", "element_size", "is_inference"),
    *("__hash__", "is_signed"),
)
_HARMLESS_ATTRIBUTES = frozenset(
    {
        *("dtype", "device", "requires_grad", "layout", "ndim", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_mps"),
        *("is_xpu", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_sparse_csr", "is_xla", "is_vulkan"),
        *("is_ipu", "is_hpu", "is_mtia", "is_maia"),
    }
)
_VIEWS = (
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "movedim", "swapaxes"),
    *("__getitem__", "to", "type", "float", "contiguous", "clone", "narrow", "div", "mul", "__rmul__", "__truediv__"),
)


_IN_PLACE = re.compile(r"__i(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__|.*[^_]_")


def _functions(names: Iterable[str], *, are_in_place: bool = False) -> frozenset[Any]:
    names = [*names, *(f"{name}_" for name in names if not name.startswith("__"))] if are_in_place else list(names)
    spaces = (torch, Tensor, functional)
    return frozenset(getattr(space, name) for space in spaces for name in names if hasattr(space, name))


UNARY = _functions(_UNARY, are_in_place=True)
"""Functions of a tensor and of numbers."""
CONVERSIONS = _functions(_CONVERSIONS)
"""Functions that return the same values, in the dtype and on the device of another tensor, if one is given."""
DROPOUT = _functions(_DROPOUT)
"""Functions that draw a random number for each element."""
BINARY = _functions(_BINARY, are_in_place=True)
"""Functions of two tensors, or of a tensor and a number."""
VIEWS = _functions(_VIEWS)
"""Functions that pass logits on to a loss. They need not act on each feature separately."""
LOSSES = frozenset({functional.cross_entropy})
"""Losses whose classes can be split."""
ATTENTION = functional.scaled_dot_product_attention
HEAD_VIEWS = _functions(("view", "reshape", "unflatten"))
"""Functions that divide features into heads."""
_HARMLESS_FUNCTIONS = _functions(_HARMLESS)


def is_harmless(function: Any) -> bool:
    """Return whether `function` reads what is the same for a part of the features."""
    attribute = attribute_of(function)
    return attribute in _HARMLESS_ATTRIBUTES if attribute else function in _HARMLESS_FUNCTIONS


@cache
def is_in_place(function: Any) -> bool:
    """Return whether `function` changes its first argument."""
    return bool(_IN_PLACE.fullmatch(name_of(function)))


def draws(args: Any, kwargs: Any) -> bool:
    """Return whether dropout with these arguments draws random numbers."""
    given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
    return bool(given.get("p", 0.5) and given.get("training", given.get("train", True)))


def attribute_of(function: Any) -> str:
    """Return the name of the attribute that `function` reads; an empty string if it is no getter."""
    if getattr(function, "__name__", "") != "__get__":
        return ""
    return str(getattr(getattr(function, "__self__", None), "__name__", ""))


def name_of(function: Any) -> str:
    """Return the name of `function` for a message."""
    return str(getattr(function, "__name__", function))


def is_constant(tensor: Tensor) -> bool:
    """Return whether `tensor` is one number for all features, and needs no gradient, which would be a part of a sum."""
    return tensor.dim() == 0 and not tensor.requires_grad


def head_size(function: Any, args: Any, kwargs: Any) -> int | None:
    """Return n if `function` changes the last dimension to `[-1, n]`; otherwise `None`."""
    if function not in HEAD_VIEWS or kwargs:
        return None
    is_unflatten = function in (Tensor.unflatten, torch.unflatten)
    sizes = args[2:] if is_unflatten else args[1:]
    if is_unflatten and args[1] not in (-1, args[0].dim() - 1):
        return None
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    before = [] if is_unflatten else list(args[0].shape[:-1])
    if len(sizes) != len(before) + 2 or list(sizes[:-2]) != before or sizes[-2] != -1:
        return None
    return int(sizes[-1]) if sizes[-1] > 0 else None
