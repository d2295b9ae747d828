"""Logits of which each rank has some of the classes: a tensor that is gathered when an operation needs all of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_paral.compat.torch.tensors import tree_leaves
from lightning_paral.engines.tensor.cross_entropy import LossOptions, split_cross_entropy
from lightning_paral.engines.tensor.functions import functions
from lightning_paral.engines.tensor.layout import Layout
from lightning_paral.engines.tensor.split_tensor import SplitTensor


class SplitLogits(SplitTensor):
    """Logits of shape `[..., V]`, of which each rank has its `own_range` of the last dimension.

    They stay split in operations on the other dimensions or on each element: `view`, `reshape`, `flatten`, `squeeze`,
    `transpose`, indexing, `to`, `float`, `clone`, `detach`, and products and quotients with a Python number. The
    cross-entropy of class indices is computed without gathering them, as `split_cross_entropy` says; its second
    derivatives are exact as well. Operations in place raise a `ConfigurationError`.
    """

    what = "Logits of which each tensor rank has some of the classes"
    example = "logits"

    @staticmethod
    def of(local: Tensor, size: int, group: dist.ProcessGroup) -> "SplitLogits":
        """Return the logits of all ranks.

        Args:
            local: this rank's part, of shape `[..., n]`, where n is the length of its `own_range` of `size`.
            size: the full size of the last dimension.
            group: the ranks.
        """
        return SplitLogits.wrap(local, Layout(local.ndim - 1, (size,)), group)

    def with_classes(self, local: Tensor, *, shares_memory: bool = False) -> "SplitLogits":
        """Return other logits with the same classes, of which this rank has `local`."""
        return self.with_local(local, self.parts.moved(local.ndim - 1), shares_memory=shares_memory)

    @classmethod
    def compute_split(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that can compute with the parts; `NotImplemented` for others."""
        if func in _STAYS_SPLIT and args and isinstance(args[0], SplitLogits):
            return _STAYS_SPLIT[func](func, *args, **kwargs)
        return NotImplemented


def _cross_entropy(
    func: Any,
    logits: SplitLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    size = logits.shape[-1]
    is_split = (
        (size_average, reduce) == (None, None)
        and reduction in ("mean", "sum", "none")
        and 0.0 <= label_smoothing <= 1.0
        and logits.ndim in (1, 2)
        and isinstance(target, Tensor)
        and not isinstance(target, SplitLogits)
        and (target.dtype, target.device) == (torch.int64, logits.device)
        and target.shape == logits.shape[:-1]
        and (weight is None or _is_supported(weight, logits))
    )
    if not is_split:  # torch computes it, or raises its own error
        return NotImplemented
    options = LossOptions(
        size=size,
        group=logits.group,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    local = logits.local if logits.ndim == 2 else logits.local.unsqueeze(0)
    loss = split_cross_entropy(local, target.reshape(len(local)), weight, options)
    return loss.reshape(target.shape) if reduction == "none" else loss


def _is_supported(weight: Tensor, logits: SplitLogits) -> bool:
    has_dtype = weight.dtype == logits.dtype or torch.is_autocast_enabled(logits.device.type)
    is_constant = not weight.requires_grad and not isinstance(weight, SplitLogits)
    return is_constant and has_dtype and weight.shape == logits.shape[-1:] and weight.device == logits.device


def _on_each_part(func: Any, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    return logits.with_classes(func(logits.local, *args, **kwargs))


def _scale(func: Any, logits: SplitLogits, factor: Any = None, **kwargs: Any) -> Any:
    # A tensor as factor may need a gradient, which would be a sum over all classes.
    return _on_each_part(func, logits, factor) if isinstance(factor, int | float) and not kwargs else NotImplemented


def _cast(func: Any, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    result = func(logits.local.new_empty((0,) * logits.ndim), *args, **kwargs)
    if not isinstance(result, Tensor):
        return result  # the name of the type
    if result.device != logits.device or not result.is_floating_point():
        return NotImplemented
    return _on_each_part(func, logits, *args, **kwargs)


def _reshape(func: Any, logits: SplitLogits, *args: Any, **kwargs: Any) -> Any:
    """Compute a function that keeps the order of the elements, if it keeps the last dimension."""
    if any(isinstance(leaf, SplitLogits) for leaf in tree_leaves((args, kwargs))):
        return NotImplemented
    result = func(torch.empty(logits.shape, dtype=logits.dtype, device="meta"), *args, **kwargs)
    if result.dtype != logits.dtype or result.shape[-1:] != logits.shape[-1:]:
        return NotImplemented
    local = logits.local.reshape(*result.shape[:-1], logits.local.shape[-1])
    return logits.with_classes(local, shares_memory=True)


def _transpose(func: Any, logits: SplitLogits, *dims: Any, **kwargs: Any) -> Any:
    if kwargs or logits.ndim - 1 in (dim % logits.ndim for dim in dims):
        return NotImplemented
    return logits.with_classes(func(logits.local, *dims), shares_memory=True)


def _permute(func: Any, logits: SplitLogits, *dims: Any, **kwargs: Any) -> Any:
    order = dims if len(dims) != 1 or isinstance(dims[0], int) else tuple(dims[0])
    if kwargs or not order or order[-1] % logits.ndim != logits.ndim - 1:
        return NotImplemented
    return logits.with_classes(logits.local.permute(order), shares_memory=True)


def _index(func: Any, logits: SplitLogits, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    num_indexed, has_tensor = 0, False
    for item in items:
        if isinstance(item, Tensor) and not isinstance(item, SplitLogits) and item.ndim > 0:
            num_indexed += item.ndim if item.dtype in (torch.bool, torch.uint8) else 1
            has_tensor = True
        elif isinstance(item, slice) or (isinstance(item, int) and not isinstance(item, bool)):
            num_indexed += 1
        elif item is not None and item is not Ellipsis:
            return NotImplemented
    has_ellipsis = any(item is Ellipsis for item in items)
    is_left_out = num_indexed < logits.ndim and (not has_ellipsis or items[-1] is Ellipsis)
    if not is_left_out:
        whole = (0, logits.shape[-1], 1)
        if not isinstance(items[-1], slice) or items[-1].indices(whole[1]) != whole or num_indexed > logits.ndim:
            return NotImplemented
        items[-1] = slice(None)
    return logits.with_classes(logits.local[tuple(items)], shares_memory=not has_tensor)


_STAYS_SPLIT: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _cross_entropy,
    **dict.fromkeys(functions("clone contiguous"), _on_each_part),
    **dict.fromkeys(functions("mul multiply div divide true_divide __mul__ __rmul__ __truediv__"), _scale),
    **dict.fromkeys(functions("to type type_as float double half bfloat16 cuda"), _cast),
    **dict.fromkeys(functions("view view_as reshape reshape_as flatten unflatten squeeze unsqueeze"), _reshape),
    **dict.fromkeys(functions("transpose swapaxes swapdims"), _transpose),
    **dict.fromkeys(functions("permute"), _permute),
    **dict.fromkeys(functions("__getitem__"), _index),
}
"""The functions that need no other rank's part, or less than that."""
