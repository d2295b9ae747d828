"""Time training steps of a GPT under `paral_pp`, and by torch's `Schedule1F1B` with stages cut by hand.

    python -m tests.benchmarks.pipeline_step

Two ranks, eight micro-batches. Rounds of both alternate in the same processes; a time is the median over all rounds.
The optimizer, the batches and the clipping (none) are the same. The hand-written stages have the embedding on the first
rank and the head on the second, as `paral_pp` has with `first_stage` and `last_stage`. Without these, both ranks have
both, and add up their gradients.
"""

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt import GPT
from lightning_paral import ParalPipelineStrategy
from tests.benchmarks.common import NUM_STEPS, StepTimes, compare, times_and_loss
from tests.running import quiet_trainer

CONTEXT, BATCH_SIZE, NUM_MICRO_BATCHES = 128, 16, 8


class TimedGPT(GPT):
    """A GPT that logs nothing, as the hand-written loop."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        """Log nothing."""


def module() -> TimedGPT:
    torch.manual_seed(0)
    return TimedGPT(width=256, num_layers=8, num_heads=4, context=CONTEXT)


def batches() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (NUM_STEPS * BATCH_SIZE, CONTEXT + 1), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), BATCH_SIZE)


ENDS: dict[str, Any] = {"first_stage": ["byte_embedding", "position_embedding"], "last_stage": ["norm", "head"]}


def under_paral_pp(**options: Any) -> tuple[list[float], float]:
    times = StepTimes()
    strategy = ParalPipelineStrategy(micro_batches=NUM_MICRO_BATCHES, divergence_check_every=None, **options)
    trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=1, callbacks=[times])
    trainer.fit(module(), batches())
    return times_and_loss(times.starts, times.losses[-1])


class FirstStage(nn.Module):
    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.byte_embedding, self.position_embedding = gpt.byte_embedding, gpt.position_embedding
        self.blocks = gpt.blocks[:4]

    def forward(self, inputs: Tensor) -> Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        return self.blocks(self.byte_embedding(inputs) + self.position_embedding(positions))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_hand() -> tuple[list[float], float]:
    rank = dist.get_rank()
    gpt = module()
    part = FirstStage(gpt) if rank == 0 else nn.Sequential(gpt.blocks[4:], gpt.norm, gpt.head)
    optimizer = torch.optim.AdamW(part.parameters(), lr=2e-3, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))  # type: ignore[no-untyped-call]
    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=loss_of)
    starts, losses = [], []
    for inputs, targets in batches():
        starts.append(time.perf_counter())
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        warmup.step()
    loss = torch.stack(losses).mean() if rank == 1 else torch.zeros(())
    dist.broadcast(loss, 1)
    return times_and_loss(starts, loss.item())


if __name__ == "__main__":
    with_ends = {"paral_pp, first_stage and last_stage": partial(under_paral_pp, **ENDS)}
    compare({"Schedule1F1B": by_hand, "paral_pp": under_paral_pp, **with_ends}, "paral_pp")
