"""Full copies of tensors of which this rank may have a shard, and the norm and the clipping of such gradients."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from lightning_paral.comm.coalescing import group_by_dtype_and_device
from lightning_paral.compat.torch.optimizers import foreach_mul_


@torch.no_grad()
def full_copy(tensor: Tensor) -> Tensor:
    """Return a full copy of `tensor`, on its device. *Collective* over its mesh if it is a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    full: Tensor = tensor.full_tensor().detach()
    # On one rank `full_tensor` gathers nothing and returns the shard itself.
    is_shard = full.untyped_storage().data_ptr() == tensor.to_local().untyped_storage().data_ptr()
    return full.clone() if is_shard else full


@torch.no_grad()
def gradient_norm(parameters: Iterable[Parameter]) -> Tensor:
    """Return the global 2-norm of the gradients of `parameters`. *Collective* over the ranks that hold shards.

    Squares of sharded gradients are summed over the ranks that hold different shards. A gradient that every rank holds
    in full counts once.

    Returns:
        A 0-dimensional tensor of dtype fp32 or wider; 0 if there is no gradient.
    """
    full: list[Tensor] = []
    sharded: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[DTensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        if isinstance(gradient, DTensor):
            sharded.setdefault((gradient.device_mesh, gradient.placements), []).append(gradient)
        else:
            full.append(gradient.coalesce().values() if gradient.is_sparse else gradient)
    squares = [_sum_of_squares(full)] if full else []
    for (mesh, placements), gradients in sharded.items():
        square = _sum_of_squares([gradient.to_local() for gradient in gradients])
        for dimension, placement in enumerate(placements):
            if not placement.is_replicate() and mesh.size(dimension) > 1:
                dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    if not squares:
        return torch.zeros(())
    device = squares[-1].device
    return torch.stack([square.to(device) for square in squares]).sum().sqrt()


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    norms: list[Tensor] = []
    for group in group_by_dtype_and_device([torch.view_as_real(t) if t.is_complex() else t for t in tensors]):
        if group[0].dtype.itemsize > 2:
            norms.append(get_total_norm(group))
        else:
            norms += [torch.linalg.vector_norm(each, dtype=torch.float32) for each in group]
    device = norms[0].device
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


@torch.no_grad()
def clip_by_norm(
    parameters: Iterable[Parameter],
    max_norm: float,
    norm_of: Callable[[Iterable[Parameter]], Tensor] = gradient_norm,
) -> Tensor:
    """Scale all gradients down, in place, so that their total norm is at most `max_norm`; return their unscaled norm.

    *Collective* like `norm_of`. The result is that of `torch.nn.utils.clip_grad_norm_` on full gradients.

    Args:
        parameters: the parameters whose gradients are clipped.
        max_norm: the largest norm.
        norm_of: returns the total norm of the gradients, of all ranks.
    """
    parameters = list(parameters)
    norm = norm_of(parameters)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for group in group_by_dtype_and_device(local_gradients(parameters)):
        foreach_mul_(group, factor.to(group[0].device))
    return norm


@torch.no_grad()
def clip_by_value(parameters: Iterable[Parameter], max_value: float) -> None:
    """Clamp every element of the gradients, in place, to at most `max_value` in magnitude. No collective."""
    for gradient in local_gradients(parameters):
        gradient.clamp_(-max_value, max_value)


def local_gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    """Return this rank's shards of sharded gradients, and other gradients in full."""
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`: the local tensor of a DTensor, and any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
