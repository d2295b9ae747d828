"""The cross-entropy of logits of which each rank has some of the classes, without gathering them.

The sums over classes are sums over ranks, as in Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.torch.tensors import LossMean
from lightning_paral.engines.tensor.collectives import own_range, sum_over_ranks
from lightning_paral.engines.tensor.layout import Layout


def split_cross_entropy(
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return `torch.nn.functional.cross_entropy` of logits; `NotImplemented` if it needs all of them.

    *Collective* in the forward pass: a maximum of N numbers, and a sum of 2 N numbers. Logits of 16 bits are computed
    with in float32.

    Args:
        logits: a `SplitTensor` of shape `[V]` or `[N, V, ...]`.
        target: class indices of dtype int64 and shape `[]` or `[N, ...]`, equal on all ranks.
        weight: has to be `None`.
        size_average: has to be `None`.
        ignore_index: as in torch.
        reduce: has to be `None`.
        reduction: as in torch.
        label_smoothing: as in torch.

    Raises:
        IndexError: a target is not a class. On CUDA, the kernel's assertion fails instead.
    """
    classes = min(1, logits.ndim - 1)
    is_split = (
        (weight, size_average, reduce) == (None, None, None)
        and reduction in ("mean", "sum", "none")
        and 0.0 <= label_smoothing <= 1.0
        and logits.parts == Layout(classes, (logits.shape[classes],))
        and type(target) is Tensor
        and (target.dtype, target.device) == (torch.int64, logits.device)
        and target.shape == logits.shape[:classes] + logits.shape[classes + 1 :]
    )
    if not is_split:  # torch computes it, or raises its own error
        return NotImplemented
    local, size, group = logits.local.movedim(classes, -1), logits.parts.size, logits.group
    wide = local.to(torch.promote_types(local.dtype, torch.float32)).reshape(-1, local.shape[-1])
    rows = own_range(size, group)
    flat = target.reshape(-1)
    counted = flat != ignore_index
    is_own, positions = _positions(flat, counted, rows, size)
    highest = wide.detach().amax(1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    # Less the highest logit, as torch computes: the loss is often much smaller than the logits.
    at_target = (wide.gather(1, positions[:, None])[:, 0] - highest).masked_fill(~is_own, 0.0)
    shifted = wide - highest[:, None]
    totals = [shifted.sum(1)] if label_smoothing > 0 else []
    sums = [shifted.exp_().sum(1), at_target, *totals]
    exponentials, logit, *all_logits = sum_over_ranks(torch.stack(sums), group).unbind()
    log_sum = exponentials.log()
    losses = log_sum - logit
    if label_smoothing > 0:
        losses = (1 - label_smoothing) * losses + label_smoothing * (log_sum - all_logits[0] / size)
    losses = losses.masked_fill(~counted, 0.0)  # not a product: a loss that does not count may be infinite
    if reduction == "none":
        loss = losses.reshape(target.shape)
    else:
        loss = LossMean.apply(losses.sum(), counted.sum()) if reduction == "mean" else losses.sum()  # type: ignore[no-untyped-call]
    return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


def _positions(target: Tensor, counted: Tensor, rows: slice, size: int) -> tuple[Tensor, Tensor]:
    """Return whether this rank has the class of each target, and its index among this rank's classes, or 0."""
    is_wrong = counted & ((target < 0) | (target >= size))
    if target.device.type == "cpu" and is_wrong.any():
        raise IndexError(f"Target {int(target[is_wrong][0])} is out of bounds for {size} classes.")
    is_own = counted & (target >= rows.start) & (target < rows.stop)
    positions = (target - rows.start).masked_fill(~is_own, 0)
    # An index out of range makes the kernel fail, without a wait for the device here.
    return is_own, positions.masked_fill(is_wrong, rows.stop - rows.start)
