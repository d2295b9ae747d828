"""Connect split tensors with this rank's parts of them in autograd's graph."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.engines.tensor.layout import Layout

if TYPE_CHECKING:
    from lightning_paral.engines.tensor.split_tensor import SplitTensor


class Wrap(torch.autograd.Function):
    """Puts a split tensor into the graph, for operations that are not recorded on its parts."""

    @staticmethod
    def forward(ctx: Any, cls: "type[SplitTensor]", local: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
        """Return a tensor of the class `cls`, of which this rank has `local`."""
        ctx.own_part, ctx.parts, ctx.group = cls.own_part, layout, group
        return cls.empty(local, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        """Return this rank's part of the gradient."""
        return None, ctx.own_part(gradient, ctx.parts, ctx.group), None, None


class Change(torch.autograd.Function):
    """Puts a split tensor into the graph again, after its part has been changed in place."""

    @staticmethod
    def forward(ctx: Any, split: "SplitTensor", local: Tensor) -> Tensor:
        """Return `split`, which now depends on `local`."""
        ctx.own_part, ctx.parts, ctx.group = split.own_part, split.parts, split.group
        ctx.mark_dirty(split)
        return split

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Return this rank's part of the gradient."""
        return None, ctx.own_part(gradient, ctx.parts, ctx.group)


class Unwrap(torch.autograd.Function):
    """Gives this rank's part of a split tensor that an `autograd.Function` has returned the gradient of its result."""

    @staticmethod
    def forward(ctx: Any, split: "SplitTensor") -> Tensor:
        """Return the part, without the graph in which it was computed."""
        ctx.wrap = split.wrapper()
        return split.part_without_graph

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient, split like the tensor."""
        wrapped: Tensor = ctx.wrap(gradient)
        return wrapped
