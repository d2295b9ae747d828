"""Attentions as people write them are split by heads, and train as in one process."""

from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_paral import ActivationCheckpointing, ParalFSDPStrategy
from tests.running import quiet_trainer
from tests.unit.engines.tensor.logits import counted

WIDTH, HEADS, LENGTH = 64, 4, 6
SIZE = WIDTH // HEADS


class ByHand(nn.Module):
    """A fused layer viewed as [3, heads, size], scores by hand, with a causal mask and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv
        assert q.shape == (batch, HEADS, length, SIZE)
        scores = (q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        attended = self.drop(functional.softmax(scores, dim=-1)) @ v
        return self.proj(attended.transpose(1, 2).contiguous().view(batch, length, width))


class Relative(nn.Module):
    """Three layers, norms of queries and keys, a learned bias and scale for each head, and einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(SIZE)
        self.bias = nn.Parameter(0.1 * torch.randn(HEADS, LENGTH, LENGTH))
        self.scale = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], HEADS, SIZE) for layer in (self.q, self.k, self.v))
        scores = torch.einsum("bihd,bjhd->bhij", self.norm(q), self.norm(k)) * self.scale
        scores += self.bias
        return self.out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(-2))


class Grouped(nn.Module):
    """Half as many keys and values, whose layer has pieces of their own sizes, and rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        angles = torch.outer(torch.arange(LENGTH), 10.0 ** -torch.arange(SIZE // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turns).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], dim=-1)
        q = q.view(batch, length, HEADS, SIZE).transpose(1, 2)
        k, v = (each.view(batch, length, HEADS // 2, SIZE).transpose(1, 2) for each in (k, v))
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        attended = functional.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, -1))


class Gated(nn.Module):
    """One layer computes the gate as well."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*map(Layer, (ByHand(), Relative(), Grouped(), Gated())))
        self.calls: list[str] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with counted() as calls:
            loss: Tensor = self.layers(batch).square().mean()
        if batch_idx:  # the first steps find out where to cut what a layer computes
            self.calls += calls
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(strategy: Any, num_ranks: int, accumulate: int) -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Model().double()
    module.layers[2].inner.turns = module.layers[2].inner.turns.to(torch.complex128)
    batches = torch.randn(40, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = quiet_trainer(
        devices=num_ranks,
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, DataLoader(batches, batch_size=8))
    return module, {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


@cache
def in_one_process(accumulate: int) -> dict[str, Tensor]:
    return fit("auto", 1, accumulate)[1]


def split(num_ranks: int, options: dict[str, Any], accumulate: int) -> tuple[dict[str, Tensor], set[str]]:
    strategy = ParalFSDPStrategy(tensor_parallel=2, split="global", **options)
    module, weights = fit(strategy, num_ranks, accumulate)
    return weights, {call.partition(" ")[0] for call in module.calls}


@pytest.mark.parametrize(
    ("num_ranks", "options", "accumulate"),
    [
        (2, {}, 1),
        (2, {"activation_checkpointing": ActivationCheckpointing(units=["Layer"])}, 1),
        (4, {"units": ["Linear"]}, 3),
        (2, {"sequence_parallel": True, "units": ["Layer"]}, 1),
        (4, {"sequence_parallel": True, "activation_checkpointing": ActivationCheckpointing(units=["Layer"])}, 1),
    ],
    ids=str,
)
def test_training_equals_one_process(on_ranks, num_ranks: int, options: dict[str, Any], accumulate: int) -> None:
    expected = in_one_process(accumulate)

    for weights, calls in on_ranks(num_ranks, split, num_ranks, options, accumulate):
        # Without positions of their own, ranks gather nothing. With them, they add nothing up but to get their rows.
        assert calls == ({"gather"} if "sequence_parallel" in options else {"sum"})
        for name, weight in weights.items():
            assert (weight - expected[name]).abs().max() <= 1e-5, name
