"""Norms and clipping of gradients of which each rank holds some rows."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_paral.comm.grouping import group_by_dtype_and_device
from lightning_paral.compat.torch.foreach import foreach_clamp_max_, foreach_clamp_min_, foreach_mul_, foreach_norm


@torch.no_grad()
def gradient_norm(parameters: Iterable[Parameter]) -> Tensor:
    """Return the 2-norm of all gradients, fp32 or wider, 0-dimensional. *Collective* over the ranks that hold shards.

    Shards are added up over the ranks that hold different ones; what every rank holds whole counts once. Without any
    gradient it is 0.
    """
    whole: list[Tensor] = []
    sharded: dict[tuple[object, ...], list[DTensor]] = {}
    for gradient in _gradients(parameters):
        if isinstance(gradient, DTensor):
            sharded.setdefault((gradient.device_mesh, gradient.placements), []).append(gradient)
        else:
            whole.append(gradient.coalesce().values() if gradient.is_sparse else gradient)
    squares = [_square(whole)] if whole else []
    for alike in sharded.values():
        mesh = alike[0].device_mesh
        square = _square([gradient.to_local() for gradient in alike])
        for dimension, placement in enumerate(alike[0].placements):
            if not placement.is_replicate() and mesh.size(dimension) > 1:
                dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    if not squares:
        return torch.zeros(())
    device = squares[-1].device
    return torch.stack([square.to(device) for square in squares]).sum().sqrt()


@torch.no_grad()
def clip_by_norm(parameters: Iterable[Parameter], max_norm: float) -> Tensor:
    """Scale all gradients down, in place, so that their common norm is at most `max_norm`; return the norm before.

    *Collective*, as `gradient_norm`. Equals `torch.nn.utils.clip_grad_norm_` of the whole gradients.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    local = [_local(gradient) for gradient in _gradients(parameters)]
    for alike in group_by_dtype_and_device(local):
        foreach_mul_(alike, factor.to(alike[0].device))
    return norm


@torch.no_grad()
def clip_by_value(parameters: Iterable[Parameter], max_value: float) -> None:
    """Clamp every element of the gradients, in place, to at most `max_value` in magnitude. No collective."""
    for alike in group_by_dtype_and_device([_local(gradient) for gradient in _gradients(parameters)]):
        foreach_clamp_min_(alike, -max_value)
        foreach_clamp_max_(alike, max_value)


def local_gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    """Return what this rank holds of the gradients that there are."""
    return [_local(gradient) for gradient in _gradients(parameters)]


def _gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _square(tensors: list[Tensor]) -> Tensor:
    squares: list[Tensor] = []
    for alike in group_by_dtype_and_device([torch.view_as_real(t) if t.is_complex() else t for t in tensors]):
        dtype = torch.promote_types(alike[0].dtype, torch.float32)
        squares += [norm.square() for norm in foreach_norm(alike, 2, dtype=dtype)]
    device = squares[0].device
    return torch.stack([square.to(device) for square in squares]).sum()
