"""Split layers exchange the activations of a block four times per step, and their gradients not at all."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paral import ParalFSDPStrategy
from tests.distributed.pipeline.test_traffic import Counts
from tests.running import quiet_trainer

WIDTH, LENGTH, BATCH_SIZE, NUM_BLOCKS = 64, 64, 48, 2


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """One layer computes queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.inputs(x).chunk(3, dim=-1)]
        return x + self.output(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Blocks(LightningModule):
    """Without parameters that are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(Attention(), FeedForward()) for _ in range(NUM_BLOCKS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.blocks(batch.requires_grad_()).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sent_in_a_step(world_size: int, sequence_parallel: bool) -> int | None:
    counts = Counts()
    trainer = quiet_trainer(
        devices=world_size,
        strategy=ParalFSDPStrategy(tensor_parallel="node", sequence_parallel=sequence_parallel),
        max_steps=4,
        callbacks=[counts],
    )
    samples = torch.randn(4 * BATCH_SIZE, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(Blocks(), DataLoader(samples, BATCH_SIZE))
    return counts.traffic.socket_bytes


@pytest.mark.parametrize(("world_size", "sequence_parallel"), [(2, False), (4, False), (2, True)])
def test_bytes_of_a_step_are_those_of_the_formula(on_ranks, world_size: int, sequence_parallel: bool) -> None:
    sent: list[Any] = on_ranks(world_size, sent_in_a_step, world_size, sequence_parallel)

    activations = BATCH_SIZE * LENGTH * WIDTH * 4
    all_reduce = 2 * (world_size - 1) * activations  # bytes that all ranks together send
    # Positions are also gathered for the loss, and in the gradient of the input: together, one all-reduce more.
    # Rows of the weight for queries, keys and values are exchanged as well, which is little for a large batch.
    assert sum(sent) == pytest.approx((4 * NUM_BLOCKS + sequence_parallel) * all_reduce, rel=0.05)
