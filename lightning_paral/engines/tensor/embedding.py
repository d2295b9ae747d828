"""Look up embeddings of which each rank has some of the rows.

A rank looks up row 0 in place of rows that other ranks have. The gradient of such a row is zero, but the row does count
as used: embeddings with `max_norm` or `scale_grad_by_freq` must stay whole.
"""

import torch.distributed as dist
from torch import Tensor

from lightning_paral.engines.tensor.collectives import sum_over_ranks


def before(ids: Tensor, rows: slice, num_embeddings: int) -> tuple[Tensor, Tensor]:
    """Return what this rank looks up among its own rows, and where another rank has the row.

    Args:
        ids: integers of any shape, equal on all ranks.
        rows: this rank's rows.
        num_embeddings: the number of rows of all ranks.

    Returns:
        The indices among this rank's rows, of the shape of `ids`, or of shape `[0]` if this rank has no rows; and a
        mask of the shape of `ids`.

    Raises:
        IndexError: an id is not a row. On CUDA, the kernel's assertion fails instead.
    """
    is_wrong = (ids < 0) | (ids >= num_embeddings)
    if ids.device.type == "cpu" and is_wrong.any():
        wrong = int(ids[is_wrong][0])
        raise IndexError(f"index {wrong} is out of range for an embedding with {num_embeddings} rows")
    is_elsewhere = (ids < rows.start) | (ids >= rows.stop)
    if rows.start == rows.stop:
        return ids.new_empty(0), is_elsewhere
    local_ids = (ids - rows.start).masked_fill(is_elsewhere, 0)
    # An index out of range makes the kernel fail, without a wait for the device here.
    return local_ids.masked_fill(is_wrong, rows.stop - rows.start), is_elsewhere


def after(output: Tensor, is_elsewhere: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the embeddings of all ids, from those of this rank. *Collective* in the forward pass.

    The result is exact: one rank contributes each row, and the others add zeros.

    Args:
        output: what this rank has looked up, of shape `[*ids.shape, d]`, or `[0, d]` if it has no rows.
        is_elsewhere: the mask that `before` has returned.
        group: the ranks.
    """
    if output.shape[:-1] != is_elsewhere.shape:
        # Zeros that depend on the weight, so that it gets a gradient as on the other ranks.
        output = output.sum(0).expand(*is_elsewhere.shape, output.shape[-1])
    return sum_over_ranks(output.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), group)


def local_padding_idx(padding_idx: int | None, rows: slice) -> int | None:
    """Return the index of the padding row among this rank's rows; `None` if there is none.

    Args:
        padding_idx: `torch.nn.Embedding.padding_idx`, which is not negative.
        rows: this rank's rows.
    """
    if padding_idx is None or not rows.start <= padding_idx < rows.stop:
        return None
    index: int = padding_idx - rows.start
    return index
