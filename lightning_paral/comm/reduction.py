"""The signature of all-reduce functions, the check of their arguments, and the arithmetic of SUM and AVG."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.errors import ConfigurationError

WireDtype = Literal["bf16", "fp16"]
WIRE_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class AllReduce(Protocol):
    """An all-reduce function: it replaces `tensor` on every rank of `group` by the sum or average over its ranks."""

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
