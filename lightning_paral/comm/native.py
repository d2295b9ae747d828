"""The backend's own all-reduce, with the signature of the other all-reduce functions."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.reduction import Reduction, plan_reduction
from lightning_paral.compat.torch.process_groups import all_gather_single


def native_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    wire_dtype: torch.dtype | None = None,
) -> Tensor:
    """Replace `tensor` by its sum or average over `group`, bit-identical on all ranks. *Collective* over `group`.

    Cost: that of the backend's algorithm, which is a ring or a tree on NCCL and a ring on gloo.

    With a narrower `wire_dtype`, the backend's all-reduce would also add in that dtype. Therefore an all-to-all sends
    every rank its chunk of all contributions, each rank adds these in the dtype of `tensor`, and an all-gather
    distributes the sums. Each rank sends 2(N-1) chunks, as in a ring, and needs memory for two copies of the tensor in
    `wire_dtype`.

    Between nodes, an all-to-all sends more data than a ring. With m nodes of k GPUs and a 16-bit `wire_dtype`, about
    2(k(m-1)/m + 1) bytes per element leave each node, compared with about 8 bytes for NCCL's fp32 ring all-reduce. Two
    nodes of four GPUs therefore send less than in fp32 (6 bytes), but two nodes of eight GPUs send more (10 bytes).

    Arguments, result and errors are those of `ring_all_reduce`.
    """
    reduction = plan_reduction(tensor, group, op, wire_dtype)
    if reduction.world_size == 1 or not tensor.numel():
        return tensor
    reduction.prepare()
    if reduction.narrow_wire:
        _exchange_narrow(reduction)
    else:
        dist.all_reduce(reduction.flat, group=reduction.group)  # gloo has no AVG
        reduction.finish(reduction.flat)
    return tensor


def _exchange_narrow(reduction: Reduction) -> None:
    flat, rank, world_size = reduction.flat, reduction.rank, reduction.world_size
    chunk = -(-flat.numel() // world_size)
    outgoing = reduction.scratch(chunk * world_size)
    outgoing[: flat.numel()].copy_(flat)
    outgoing[flat.numel() :].zero_()
    contributions = torch.empty_like(outgoing)
    dist.all_to_all_single(contributions, outgoing, group=reduction.group)
    total = contributions.view(world_size, chunk).sum(dim=0, dtype=flat.dtype)
    reduction.finish(total)
    mine = contributions[rank * chunk : (rank + 1) * chunk].copy_(total)
    all_gather_single(outgoing, mine, group=reduction.group)
    flat.copy_(outgoing[: flat.numel()])
