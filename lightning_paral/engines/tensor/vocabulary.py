"""Embeddings of which each rank has some of the rows, and the cross-entropy of logits, each rank with some classes.

As in Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: sums over rows or classes are sums over ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.torch.tensors import LossMean
from lightning_paral.engines.tensor.collectives import Layout, own_range, sum_over_ranks


def own_rows_of_ids(ids: Tensor, rows: slice, num_embeddings: int) -> tuple[Tensor, Tensor]:
    """Return what this rank looks up among its own rows, and where another rank has the row.

    Args:
        ids: integers of any shape, equal on all ranks.
        rows: this rank's rows.
        num_embeddings: the number of rows of all ranks.

    Returns:
        The indices among this rank's rows, and a mask, both of the shape of `ids`.

    Raises:
        IndexError: an id is not a row. On CUDA, the kernel's assertion fails instead.
    """
    is_own, local_ids = _own(ids, torch.ones_like(ids, dtype=torch.bool), rows, num_embeddings, _NO_ROW)
    return local_ids, ~is_own


def rows_of_ids(output: Tensor, is_elsewhere: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the embeddings of all ids, from those of this rank. *Collective* in the forward pass.

    The result is exact: one rank contributes each row, and the others add zeros.

    Args:
        output: what this rank has looked up, of shape `[*ids.shape, d]`.
        is_elsewhere: the mask that `own_rows_of_ids` has returned.
        group: the ranks.
    """
    return sum_over_ranks(output.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), group)


def local_padding_idx(padding_idx: int | None, rows: slice) -> int | None:
    """Return the index of the padding row among this rank's rows; `None` if there is none.

    Args:
        padding_idx: `torch.nn.Embedding.padding_idx`, which is not negative.
        rows: this rank's rows.
    """
    if padding_idx is None or not rows.start <= padding_idx < rows.stop:
        return None
    return int(padding_idx - rows.start)


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
        label_smoothing: has to be 0.

    Raises:
        IndexError: a target is not a class. On CUDA, the kernel's assertion fails instead.
    """
    classes = min(1, logits.ndim - 1)
    is_split = (
        (weight, size_average, reduce, label_smoothing) == (None, None, None, 0.0)
        and reduction in ("mean", "sum", "none")
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
    is_own, positions = _own(flat, counted, rows, size, _NO_CLASS)
    highest = wide.detach().amax(1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    # Less the highest logit, as torch computes: the loss is often much smaller than the logits.
    at_target = (wide.gather(1, positions[:, None])[:, 0] - highest).masked_fill(~is_own, 0.0)
    sums = torch.stack([(wide - highest[:, None]).exp_().sum(1), at_target])
    exponentials, logit = sum_over_ranks(sums, group).unbind()
    losses = exponentials.log() - logit
    losses = losses.masked_fill(~counted, 0.0)  # not a product: a loss that does not count may be infinite
    if reduction == "none":
        loss = losses.reshape(target.shape)
    else:
        loss = LossMean.apply(losses.sum(), counted.sum()) if reduction == "mean" else losses.sum()  # type: ignore[no-untyped-call]
    return loss if torch.is_autocast_enabled(logits.device.type) else loss.to(logits.dtype)


_NO_ROW = "index {} is out of range for an embedding with {} rows"
_NO_CLASS = "Target {} is out of bounds for {} classes."
"""The errors of torch."""


def _own(numbers: Tensor, counted: Tensor, rows: slice, size: int, error: str) -> tuple[Tensor, Tensor]:
    """Return whether this rank has the row, or class, of each number, and its place among this rank's, or 0.

    Only numbers that are `counted` have to be less than `size`, the number of all rows.
    """
    is_wrong = counted & ((numbers < 0) | (numbers >= size))
    if numbers.device.type == "cpu" and is_wrong.any():
        raise IndexError(error.format(int(numbers[is_wrong][0]), size))
    is_own = counted & (numbers >= rows.start) & (numbers < rows.stop)
    places = (numbers - rows.start).masked_fill(~is_own, 0)
    # An index out of range makes the kernel fail, without a wait for the device here.
    return is_own, places.masked_fill(is_wrong, rows.stop - rows.start)
