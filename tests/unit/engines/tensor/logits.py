"""Logits, whole and split, functions of them, and a count of what their operations communicate."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.engines.tensor import collectives
from lightning_paral.engines.tensor.collectives import Layout, own_range
from lightning_paral.engines.tensor.split_tensor import SplitTensor

OnRanks = Callable[..., list[Any]]
SIZES = (3, 7, 8)
"""Numbers of classes. Divided by 3 ranks, parts are equal or shorter."""


@contextmanager
def counted() -> Iterator[list[str]]:
    """Yield a list that receives a description of each collective."""
    calls: list[str] = []
    all_reduce, all_gather = dist.all_reduce, collectives.all_gather_single

    def counted_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
        calls.append(f"{'max' if op == dist.ReduceOp.MAX else 'sum'} {tensor.numel()}")
        return all_reduce(tensor, op, group=group)

    def counted_all_gather(output: Tensor, tensor: Tensor, group: Any) -> Any:
        calls.append(f"gather {output.numel()}")
        return all_gather(output, tensor, group=group)

    dist.all_reduce, collectives.all_gather_single = counted_all_reduce, counted_all_gather
    try:
        yield calls
    finally:
        dist.all_reduce, collectives.all_gather_single = all_reduce, all_gather


def pair(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same logits twice, as products of one input, and split: whole leaf, split leaf, split logits."""
    return split((3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype))


def split(values: Tensor) -> tuple[Tensor, Tensor, SplitTensor]:
    shape, whole = values.shape, values.clone().requires_grad_()
    local = values[..., own_range(shape[-1], dist.group.WORLD)].clone().requires_grad_()
    return whole, local, SplitTensor.of(local, Layout(values.ndim - 1, shape[-1:]), dist.group.WORLD)


def own(full: Tensor) -> Tensor:
    return full[..., own_range(full.shape[-1], dist.group.WORLD)]


def targets(size: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(size, shape, generator=torch.Generator().manual_seed(5))


class Same(torch.autograd.Function):
    """Returns its input, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient
