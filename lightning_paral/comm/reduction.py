"""All-reduce functions: their signature, the check of their arguments, SUM and AVG, and the backend's own algorithm."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.compat.torch.process_groups import all_gather_single
from lightning_paral.errors import ConfigurationError

WireDtype = Literal["bf16", "fp16"]
WIRE_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class AllReduce(Protocol):
    """An all-reduce function: it replaces `tensor` on every rank of `group` by its sum or average over the ranks.

    The result is bit-identical on all ranks.

    Args:
        tensor: a contiguous tensor of any shape, floating point or integer. It is reduced in place.
        group: the ranks that take part; `None` for the default group.
        op: `ReduceOp.SUM` or `ReduceOp.AVG`.
        wire_dtype: the floating-point dtype of the messages; `None` for the dtype of `tensor`. Additions are done in
            the dtype of `tensor`.

    Raises:
        ConfigurationError: `op` is neither SUM nor AVG, `tensor` is not contiguous, or `wire_dtype` is given and
            `tensor` or `wire_dtype` is not floating point.
    """

    def __call__(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        *,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        wire_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Reduce `tensor` in place and return it. *Collective* over `group`."""
        ...


@dataclass(frozen=True)
class Reduction:
    """The checked arguments of one all-reduce: a flat view of the tensor, the group, and this process's rank in it."""

    flat: Tensor
    """A contiguous view of the tensor, of shape `[length]`. The result is written to it."""

    group: dist.ProcessGroup
    rank: int
    world_size: int
    average: bool
    wire_dtype: torch.dtype
    """The dtype of the messages: that of `flat`, or a narrower one."""

    @property
    def narrow_wire(self) -> bool:
        """Whether tensors are cast to a narrower dtype when they are sent."""
        return self.wire_dtype != self.flat.dtype

    def prepare(self) -> None:
        """Before an average in fp16, divide this rank's contribution by the number of ranks: the sum could overflow."""
        if self.average and self.narrow_wire and self.wire_dtype == torch.float16:
            self.flat.div_(self.world_size)

    def finish(self, summed: Tensor) -> None:
        """Divide `summed` in place for an average, unless `prepare` did so. Integer averages round towards zero."""
        if not self.average or (self.narrow_wire and self.wire_dtype == torch.float16):
            return
        rounding_mode = None if summed.is_floating_point() else "trunc"
        summed.div_(self.world_size, rounding_mode=rounding_mode)

    def scratch(self, num_elements: int) -> Tensor:
        """Return an uninitialized buffer for messages, of shape `[num_elements]`."""
        return torch.empty(num_elements, dtype=self.wire_dtype, device=self.flat.device)


def plan_reduction(
    tensor: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType, wire_dtype: torch.dtype | None
) -> Reduction:
    """Check the arguments of an all-reduce and return its `Reduction`.

    Raises:
        ConfigurationError: `op` is neither SUM nor AVG, `tensor` is not contiguous, or `wire_dtype` is given and
            `tensor` or `wire_dtype` is not floating point.
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ConfigurationError(f"all-reduce supports ReduceOp.SUM and ReduceOp.AVG, but got {op!r}.")
    if not tensor.is_contiguous():
        raise ConfigurationError(
            f"all-reduce works in place on contiguous tensors, but got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}. Pass `tensor.contiguous()`."
        )
    if wire_dtype is not None and not (tensor.is_floating_point() and wire_dtype.is_floating_point):
        raise ConfigurationError(
            f"A wire dtype narrows floating-point tensors, but got wire_dtype={wire_dtype} for a tensor of "
            f"{tensor.dtype}. Leave wire_dtype out."
        )
    if group is None:
        dist.get_rank()  # raises if there is no default group
        group = dist.group.WORLD
        assert group is not None
    if wire_dtype is None or wire_dtype.itemsize >= tensor.dtype.itemsize:
        wire_dtype = tensor.dtype
    return Reduction(
        flat=tensor.detach().view(-1),
        group=group,
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        average=op == dist.ReduceOp.AVG,
        wire_dtype=wire_dtype,
    )


def as_all_reduce(algorithm: Callable[[Reduction], None]) -> AllReduce:
    """Return the all-reduce function of an algorithm, which is not called for a single rank or an empty tensor."""

    def all_reduce(
        tensor: Tensor,
        group: dist.ProcessGroup | None = None,
        *,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        wire_dtype: torch.dtype | None = None,
    ) -> Tensor:
        reduction = plan_reduction(tensor, group, op, wire_dtype)
        if reduction.world_size > 1 and tensor.numel():
            reduction.prepare()
            algorithm(reduction)
        return tensor

    # Not by `functools.wraps`, which would give it the signature of the algorithm.
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(all_reduce, name, getattr(algorithm, name))
    return all_reduce


@as_all_reduce
def native_all_reduce(reduction: Reduction) -> None:
    """Reduce by the backend's own collectives: an `AllReduce`.

    Cost: that of the backend's algorithm, which is a ring or a tree on NCCL and a ring on gloo.

    With a narrower `wire_dtype`, the backend's all-reduce would also add in that dtype. Therefore an all-to-all sends
    every rank its chunk of all contributions, each rank adds these in the dtype of `tensor`, and an all-gather
    distributes the sums. Each rank sends 2(N-1) chunks, as in a ring, and needs memory for two copies of the tensor in
    `wire_dtype`.

    Between nodes, an all-to-all sends more data than a ring. With m nodes of k GPUs and a 16-bit `wire_dtype`, about
    2(k(m-1)/m + 1) bytes per element leave each node, compared with about 8 bytes for NCCL's fp32 ring all-reduce. Two
    nodes of four GPUs therefore send less than in fp32 (6 bytes), but two nodes of eight GPUs send more (10 bytes).
    """
    flat, rank, world_size = reduction.flat, reduction.rank, reduction.world_size
    if not reduction.narrow_wire:
        dist.all_reduce(flat, group=reduction.group)  # gloo has no AVG
        reduction.finish(flat)
        return
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
