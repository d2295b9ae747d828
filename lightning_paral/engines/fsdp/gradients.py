"""Reduce gradients: of parameters that each rank holds in full, of steps of a pipeline, and on gloo."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_paral.checkpoint.layout import dtensor_like
from lightning_paral.comm.coalescing import group_by_dtype_and_device
from lightning_paral.comm.reduce_scatter import direct_reduce_scatter, sum_of_own_chunk
from lightning_paral.compat.torch.autograd import call_at_end_of_backward
from lightning_paral.compat.torch.dtensor import local_of


class AveragedGradients:
    """Averages the gradients of replicated parameters over the data ranks at the end of each backward pass.

    It uses one all-reduce per dtype and device. Backward passes that only accumulate are averaged as well: averaging
    equal values again, in a later pass, changes nothing.

    Args:
        parameters: the parameters that are replicated on the data ranks.
        num_ranks: the number of data ranks.
        group: the process group of the data ranks; `None` for the world.
    """

    def __init__(self, parameters: list[Parameter], num_ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self._num_ranks = num_ranks
        self._group = group
        parameters = [each for each in parameters if each.is_floating_point() or each.is_complex()]
        self._parameters = parameters
        self._queued = False
        self._handles = [_register_gradient_hook(parameter, self._queue_average) for parameter in parameters]

    def remove(self) -> None:
        """Stop averaging."""
        for handle in self._handles:
            handle.remove()

    def _queue_average(self, parameter: Tensor) -> None:
        if isinstance(parameter.grad, DTensor):  # of a loss that is computed from shards alone, such as a penalty
            parameter.grad = parameter.grad.full_tensor()
        if self._num_ranks > 1 and not self._queued:
            self._queued = True
            call_at_end_of_backward(self._average)

    def _average(self) -> None:
        self._queued = False
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        for similar in group_by_dtype_and_device(gradients):
            flat = torch.cat([gradient.view(-1) for gradient in similar])
            dist.all_reduce(flat, group=self._group)
            flat.div_(self._num_ranks)
            for gradient, averaged in zip(similar, torch.split(flat, [g.numel() for g in similar]), strict=True):
                gradient.copy_(averaged.view_as(gradient))


def _register_gradient_hook(parameter: Parameter, hook: object) -> torch.utils.hooks.RemovableHandle:
    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses hooks on frozen parameters; this one may be unfrozen later
    handle: torch.utils.hooks.RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)
    return handle


@torch.no_grad()
def scatter_gradients(params: Sequence[Any], gradients: Sequence[Tensor | None], group: dist.ProcessGroup) -> None:
    """Add this rank's part of the mean of `gradients` over `group` to the gradients of the shards. *Collective*.

    Args:
        params: the `FSDPParam`s of a unit, sharded along their first dimension over `group`, of the same dtype.
        gradients: for each of them, its full gradient on this rank; `None` counts as zero.
        group: the ranks that hold different shards.
    """
    num_ranks = dist.get_world_size(group)
    sizes = [param.padded_sharded_param_size for param in params]
    like = local_of(params[0].sharded_param)
    padded = like.new_zeros((num_ranks, sum(map(torch.Size.numel, sizes))))
    position = 0
    for size, gradient in zip(sizes, gradients, strict=True):
        if gradient is not None:
            _fill(padded[:, position : position + size.numel()], gradient)
        position += size.numel()
    own = sum_of_own_chunk(padded, group).div_(num_ranks)
    for param, size, part in zip(params, sizes, torch.split(own, [size.numel() for size in sizes]), strict=True):
        shard: Parameter = param.sharded_param
        part = part.view(size).narrow(0, 0, local_of(shard).size(0))
        if shard.grad is None:
            shard.grad = dtensor_like(part, cast("Any", shard))
        else:
            local_of(shard.grad).add_(part)


def _fill(chunks: Tensor, gradient: Tensor) -> None:
    """Copy `gradient` to the rows of `chunks`, one after the other."""
    flat, length = gradient.contiguous().view(-1), chunks.size(1)
    full, rest = divmod(flat.numel(), length)
    chunks[:full].copy_(flat[: full * length].view(full, length))
    if rest:
        chunks[full, :rest].copy_(flat[full * length :])


class DirectReduceScatter:
    """A reduce-scatter for gloo, whose own reduce-scatter is an all-reduce that discards most of the result.

    It implements the interface that `FSDPModule.set_custom_reduce_scatter` expects, which has no public name.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's shard of the sum or average of `input_tensor` to `output_tensor`. *Collective*.

        The memory of `input_tensor` is then free: FSDP2 holds the tensor until the next unit has its gradients, because
        a stream might still read it.
        """
        direct_reduce_scatter(output_tensor, input_tensor, group)
        input_tensor.untyped_storage().resize_(0)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(dist.get_world_size(group))
