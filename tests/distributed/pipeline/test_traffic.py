"""A pipeline sends the activations of a boundary and their gradients, once per micro-batch."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paral import ParalPipelineStrategy
from lightning_paral.comm.point_to_point import count_traffic
from tests.running import quiet_trainer

WIDTH, LENGTH, BATCH_SIZE = 128, 64, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Blocks(LightningModule):
    """Has no parameters outside of the blocks, whose gradients would be added up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(8)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counts(Callback):
    """Counts the bytes that a rank sends in the third step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:  # in which the step is not rehearsed
            self.counting = count_traffic()
            self.traffic = self.counting.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:  # in which the step is not rehearsed
            trainer.strategy.barrier()
            self.counting.__exit__(None, None, None)


def sent_in_a_step(world_size: int, options: dict[str, Any]) -> tuple[int, int | None]:
    counts = Counts()
    trainer = quiet_trainer(
        devices=world_size,
        strategy=ParalPipelineStrategy(micro_batches=4, **options),
        max_steps=4,
        callbacks=[counts],
    )
    data_size = world_size // options.get("stages", world_size)
    samples = torch.randn(4 * BATCH_SIZE * data_size, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer.fit(Blocks(), DataLoader(samples, BATCH_SIZE))
    return counts.traffic.payload_bytes, counts.traffic.socket_bytes


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_bytes_of_a_step_are_those_of_the_formula(on_ranks, world_size: int, schedule: str) -> None:
    ranks = on_ranks(world_size, sent_in_a_step, world_size, {"schedule": schedule})

    boundary = BATCH_SIZE * LENGTH * WIDTH * 4
    num_parts = 2 * world_size if schedule == "interleaved" else world_size
    expected = 2 * boundary * (num_parts - 1)  # activations and gradients pass each boundary once
    for number, counted in enumerate(zip(*ranks, strict=True)):
        assert sum(counted) == pytest.approx(expected, rel=0.05), ("payload", "sockets")[number]


def test_shards_send_what_averaging_the_gradients_of_replicas_sends(on_ranks) -> None:
    pipelines = 2 * 2 * BATCH_SIZE * LENGTH * WIDTH * 4  # of two pipelines, as above
    stage = 4 * (WIDTH * WIDTH + WIDTH) * 4
    gathered_and_scattered = 4 * 2 * stage // 2  # each of four ranks sends half of its stage for each

    for options in ({"stages": 2, "shard": True}, {"stages": 2}):
        sent = [bytes_of_rank for _, bytes_of_rank in on_ranks(4, sent_in_a_step, 4, options)]
        assert sum(sent) == pytest.approx(pipelines + gathered_and_scattered, rel=0.05), options
