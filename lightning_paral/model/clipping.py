"""Clip gradients of which this rank may have only shards, or those of some parameters."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_paral.comm.grouping import group_by_dtype_and_device
from lightning_paral.compat.torch.optimizers import foreach_clamp_max_, foreach_clamp_min_, foreach_mul_
from lightning_paral.model.full_tensors import gradient_norm


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
    local = [local_part(gradient) for gradient in _gradients(parameters)]
    for group in group_by_dtype_and_device(local):
        foreach_mul_(group, factor.to(group[0].device))
    return norm


@torch.no_grad()
def clip_by_value(parameters: Iterable[Parameter], max_value: float) -> None:
    """Clamp every element of the gradients, in place, to at most `max_value` in magnitude. No collective."""
    for group in group_by_dtype_and_device([local_part(gradient) for gradient in _gradients(parameters)]):
        foreach_clamp_min_(group, -max_value)
        foreach_clamp_max_(group, max_value)


def local_gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    """Return this rank's shards of sharded gradients, and other gradients in full."""
    return [local_part(gradient) for gradient in _gradients(parameters)]


def _gradients(parameters: Iterable[Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`: the local tensor of a DTensor, and any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
