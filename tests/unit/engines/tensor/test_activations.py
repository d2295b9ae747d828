"""Functions on activations of which each rank has some of the heads equal those on whole activations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_paral.engines.tensor.layout import Layout, own_parts
from lightning_paral.engines.tensor.split_tensor import SplitTensor
from tests.unit.engines.tensor.logits import OnRanks, Same, Square, counted

BATCH, LENGTH, HEADS, SIZE = 2, 3, 4, 6
WIDTH = HEADS * SIZE


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(shape: tuple[int, ...], layout: Layout) -> tuple[Tensor, Tensor, SplitTensor]:
    """Return the same activations twice: whole leaf, split leaf, split activations."""
    whole = values(*shape).requires_grad_()
    local = own_parts(whole.detach(), layout, dist.group.WORLD).clone().requires_grad_()
    return whole, local, SplitTensor.of(local, layout, dist.group.WORLD)


def heads(x: Tensor) -> Tensor:
    return x.view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2)


def rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    angles = values(LENGTH, SIZE, seed=3)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def as_complex(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = pairs * torch.polar(torch.ones(LENGTH, SIZE // 2, dtype=torch.float64), values(LENGTH, SIZE // 2))
    return torch.view_as_real(turned).flatten(3)


def changed_in_place(x: Tensor) -> Tensor:
    x = heads(x) * 1.0
    x += BIAS
    x.masked_fill_(MASK, -1.0)
    x[..., 1].mul_(2.0)
    return x.relu_()


BIAS, MASK = values(1, HEADS, LENGTH, SIZE, seed=1), values(LENGTH, SIZE, seed=2) > 0.5
MATRIX = values(SIZE, 5, seed=4)
POSITIONS = values(1, HEADS, LENGTH, LENGTH, seed=5)

ON_HEADS: dict[str, Callable[[Any], Any]] = {
    "view": heads,
    "view back": lambda x: heads(x).transpose(1, 2).reshape(BATCH, LENGTH, -1),
    "unflatten": lambda x: x.unflatten(-1, (HEADS, -1)).flatten(2),
    "shape": lambda x: x * x.shape[-1] + x.size(1) + len(x) + x.numel(),
    "permute": lambda x: x.view(BATCH, LENGTH, HEADS, SIZE).permute(2, 0, 1, 3).movedim(0, -2),
    "squeeze": lambda x: heads(x)[:, :, :1].squeeze(2).unsqueeze(0).squeeze(),
    "index": lambda x: heads(x)[:, :, None, -1][0, ..., ::2],
    "unbind": lambda x: sum(heads(x).unbind(2)),
    "split": lambda x: torch.stack([a * b for a, b in zip(*[heads(x).split(3, -1)] * 2, strict=True)], 1),
    "cat": lambda x: torch.cat([heads(x), heads(x) * 2], dim=2),
    "expand": lambda x: heads(x)[:, :, None].expand(-1, HEADS, 2, -1, SIZE).reshape(BATCH, 2 * HEADS, LENGTH, SIZE),
    "repeat": lambda x: heads(x).repeat_interleave(2, dim=1).repeat(2, 1, 1, 1),
    "rotary": lambda x: rotated(heads(x)),
    "complex": lambda x: as_complex(heads(x)),
    "bias": lambda x: heads(x) + BIAS,
    "bias twice": lambda x: torch.addcmul(heads(x), BIAS, BIAS),
    "mask": lambda x: torch.where(MASK, heads(x), 0.5).masked_fill(~MASK, 0.25),
    "number": lambda x: (2 - heads(x) / 3) ** 2,
    "softmax": lambda x: heads(x).softmax(-1) + F.softmax(heads(x), dim=2),
    "sum": lambda x: heads(x).sum(-1) + heads(x).mean((0, 3)) + heads(x).amax(dim=-1, keepdim=True).squeeze(-1),
    "norm": lambda x: F.layer_norm(heads(x), (SIZE,), values(SIZE), values(SIZE, seed=1)),
    "matmul": lambda x: heads(x) @ heads(x).transpose(-2, -1),
    "matmul whole": lambda x: heads(x) @ MATRIX,
    "einsum": lambda x: torch.einsum("bhld, bhmd -> bhlm", heads(x), heads(x)),
    "einsum whole": lambda x: torch.einsum("blhd,de,xhlm->bmhe", x.view(BATCH, LENGTH, HEADS, SIZE), MATRIX, POSITIONS),
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True),
    "attention with mask": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), POSITIONS, scale=0.1),
    "triangle": lambda x: (heads(x) @ heads(x).mT).tril(),
    "in place": changed_in_place,
    "in place, then own functions": lambda x: Square.apply(Same.apply(heads(x * 1.0).add_(BIAS).relu_())),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda y: heads(y).exp(), x, use_reentrant=False),
}
"""Functions that need no collective in the forward pass."""

ON_SEGMENTS: dict[str, Callable[[Any], Any]] = {
    "chunk": lambda x: [F.scaled_dot_product_attention(*map(heads, x.chunk(3, dim=-1)))],
    "split": lambda x: [torch.stack([heads(each) for each in x.split(WIDTH, -1)], 0)],
    "view": lambda x: list(x.view(BATCH, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)),
    "index": lambda x: [x[..., :WIDTH] * x[..., WIDTH : 2 * WIDTH] * x.narrow(-1, 2 * WIDTH, WIDTH)],
}

NEEDS_ALL: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: heads(x).softmax(1),
    "mean": lambda x: x.mean(),
    "sum": lambda x: heads(x).sum(1),
    "one head": lambda x: heads(x)[:, 1],
    "matmul": lambda x: x @ values(WIDTH, 2),
    "flip": lambda x: heads(x).flip(1),
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "attention of positions": lambda x: F.scaled_dot_product_attention(*[heads(x).transpose(1, 2)] * 3, is_causal=True),
    "triangle": lambda x: heads(x).transpose(1, 2).tril(),
    "repeat": lambda x: heads(x).repeat(1, 2, 1, 1),
}


def compare(function: Callable[[Any], Any], layout: Layout, shape: tuple[int, ...]) -> list[str]:
    """Compare values and gradients with whole activations, and return the collectives of the forward pass."""
    whole, local, split = pair(shape, layout)
    expected = function(whole)
    with counted() as calls:
        found = function(split)
        communicated = list(calls)
    expected, found = ([each] if isinstance(each, Tensor) else each for each in (expected, found))
    for one, other in zip(expected, found, strict=True):
        assert other.shape == one.shape
        full = other.full() if isinstance(other, SplitTensor) else other
        torch.testing.assert_close(full, one)
    weights = [values(*each.shape, seed=9) for each in expected]
    sum((each.double() * weight).sum() for each, weight in zip(expected, weights, strict=True)).backward()
    sum((each.double() * weight).sum() for each, weight in zip(found, weights, strict=True)).backward()
    torch.testing.assert_close(local.grad, own_parts(whole.grad, layout, dist.group.WORLD))
    return communicated


def compare_heads() -> None:
    for name, function in ON_HEADS.items():
        assert compare(function, Layout(2, (WIDTH,)), (BATCH, LENGTH, WIDTH)) == [], name


def compare_segments() -> None:
    for name, function in ON_SEGMENTS.items():
        assert compare(function, Layout(2, (WIDTH,) * 3), (BATCH, LENGTH, 3 * WIDTH)) == [], name


def compare_gathered() -> None:
    for name, function in NEEDS_ALL.items():
        assert len(compare(function, Layout(2, (WIDTH,)), (BATCH, LENGTH, WIDTH))) == 1, name
    for name, function in ON_SEGMENTS.items():  # consecutive features are not the heads of three tensors
        assert compare(function, Layout(2, (3 * WIDTH,)), (BATCH, LENGTH, 3 * WIDTH)), name


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("compared", [compare_heads, compare_segments, compare_gathered])
def test_functions_equal_those_on_whole_activations(on_ranks: OnRanks, world_size: int, compared: Any) -> None:
    on_ranks(world_size, compared)
