"""A training step of the example's GPT by name against the same step in a hand-written torch DDP loop.

    torchrun --nproc-per-node 2 -m tests.benchmarks.ddp_step

Blocks of steps of both kinds alternate in the same processes; a step lasts from the end of one to the end of the next.
"""

import argparse
import statistics
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import lightning_paral  # noqa: F401  registers the names
from examples.gpt import GPT, StandardLibrary
from tests.running import quiet_trainer

BATCH_SIZE, CONTEXT = 32, 128


class StepTimes(Callback):
    """Records the seconds from the end of each training step to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: object) -> None:
        self.ends.append(time.perf_counter())


class Loss(torch.nn.Module):
    """Wraps the model for a hand-written loop: its forward pass returns the loss."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.model.loss(batch)


def differences(ends: list[float]) -> list[float]:
    return [end - start for start, end in pairwise(ends[1:])]  # the first step warms up


def steps_by_name(strategy: str, dataset: StandardLibrary, num_steps: int) -> list[float]:
    times = StepTimes()
    trainer = quiet_trainer(
        strategy=strategy, devices=dist.get_world_size(), max_steps=num_steps, gradient_clip_val=1.0, callbacks=[times]
    )
    trainer.fit(GPT(), DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True))
    return differences(times.ends)


def steps_by_hand(dataset: StandardLibrary, num_steps: int) -> list[float]:
    model = GPT()
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=DistributedSampler(dataset), drop_last=True)

    wrapped = DistributedDataParallel(Loss(model))
    ends = []
    for number, batch in enumerate(loader):
        if number == num_steps:
            break
        optimizer.zero_grad()
        wrapped(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ends.append(time.perf_counter())
    return differences(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="paral_ddp")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dataset = StandardLibrary("train", CONTEXT)
    by_name, by_hand = [], []
    for _ in range(arguments.blocks):
        by_name += steps_by_name(arguments.strategy, dataset, arguments.steps)
        by_hand += steps_by_hand(dataset, arguments.steps)
    if dist.get_rank() == 0:
        named, written = statistics.median(by_name), statistics.median(by_hand)
        print(
            f"{arguments.strategy}: {named * 1e3:.1f} ms by name, {written * 1e3:.1f} ms by hand, "
            f"ratio {named / written:.3f} (medians of {len(by_name)} steps each, {dist.get_world_size()} ranks)"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
