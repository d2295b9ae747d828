"""Preempt runs at random times: `python -m tests.distributed.preempted --runs 60`.

Python and Lightning are imported once; each run is two forked ranks that get SIGTERM or SIGUSR1, one of them or both.
After each, there must be one valid checkpoint, and a resumed run must have the losses of an uninterrupted one.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_paral import Preemption
from lightning_paral.checkpoint.integrity import verify
from tests.contract.cases import strategy_of
from tests.running import quiet_trainer

STRATEGIES = ("paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3")
SECONDS = 400
Losses = list[tuple[int, int, float]]


class Noisy(Dataset[Tensor]):
    """Samples that draw from the global generator: a sample that is drawn twice would change all later ones."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.01)
        return torch.full((4,), index / 48) + 0.1 * torch.rand(4)


class Preempted(LightningModule):
    """A small module with dropout and a scheduler, which writes its losses to a file."""

    def __init__(self, losses: Path) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.losses = losses

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).pow(2).mean()
        with self.losses.open("a") as file:
            file.write(json.dumps([self.trainer.current_epoch, batch_idx, loss.item()]) + "\n")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation", self.layers(batch).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def train(rank: int, folder: Path, name: str, strategy: str, resume: str | None) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="preempted"
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    store = dist.FileStore(str(folder / f"store-{name}"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(5)
    preemption = Preemption(dirpath=folder)
    trainer = quiet_trainer(
        devices=2,
        strategy=strategy_of(strategy),
        callbacks=[preemption],
        max_epochs=3,
        accumulate_grad_batches=2,
        val_check_interval=0.5,
        num_sanity_val_steps=0,
    )
    module = Preempted(folder / f"{name}-{rank}.jsonl")
    train_loader = DataLoader(Noisy(), batch_size=2, shuffle=True)
    trainer.fit(module, train_loader, DataLoader(Noisy(), batch_size=8), ckpt_path=resume)


def start(folder: Path, name: str, strategy: str, resume: str | None = None) -> list[int]:
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                train(rank, folder, name, strategy, resume)
                status = 0
            except SystemExit as error:
                status = int(error.code or 0)
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        children.append(child)
    return children


def wait_for(children: list[int]) -> list[int]:
    """Return the exit statuses of the children; end those that do not exit within `SECONDS`."""
    deadline, found = time.monotonic() + SECONDS, dict.fromkeys(children, -1)
    left = set(children)
    while left:
        for child in list(left):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                found[child] = os.waitstatus_to_exitcode(status)
                left.remove(child)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return list(found.values())


def losses_of(folder: Path, name: str) -> list[Losses]:
    """Return the epoch, the batch and the loss of each step, by rank."""
    files = [folder / f"{name}-{rank}.jsonl" for rank in range(2)]
    return [[tuple(json.loads(line)) for line in file.read_text().splitlines()] for file in files if file.exists()]


def preempt(folder: Path, strategy: str, expected: list[Losses], chance: random.Random) -> str:
    """Start a run, preempt it at a random step, resume it, and compare. Return what happened."""
    folder.mkdir()
    children = start(folder, "first", strategy)
    step, deadline = chance.randrange(len(expected[0])), time.monotonic() + SECONDS
    while len((losses_of(folder, "first") or [[]])[0]) <= step:
        if time.monotonic() > deadline or os.waitpid(children[0], os.WNOHANG)[0]:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            raise AssertionError(f"{strategy}: the run does not train, or a rank ended by itself")
        time.sleep(0.002)
    time.sleep(chance.uniform(0.0, 0.02))
    signum, who = chance.choice((signal.SIGTERM, signal.SIGUSR1)), chance.choice(((0,), (1,), (0, 1), (1, 0)))
    for rank in who:
        os.kill(children[rank], signum)
        time.sleep(chance.choice((0.0, 0.005)))
    ended = wait_for(children)
    case = f"{strategy}, {signum.name} to {who} after step {step}"
    saved = sorted(folder.glob("*.ckpt"))
    if not saved:  # the signal arrived after the last batch, or after the run
        assert losses_of(folder, "first") == expected, f"{case}: no checkpoint, {ended}"
        return "finished"
    assert [abs(status) % 128 for status in ended] == [signum % 128] * 2 or set(ended) <= {143, 138}, f"{case}: {ended}"
    assert len(saved) == 1, f"{case}: {saved}"
    faults = verify(saved[0])
    assert not faults, f"{case}: {faults}"
    assert not list(folder.glob(".*")), f"{case}: leftovers"
    assert wait_for(start(folder, "resumed", strategy, str(saved[0]))) == [0, 0], f"{case}: the resumed run failed"
    resumed = losses_of(folder, "resumed") or [[], []]
    joined = [before + after for before, after in zip(losses_of(folder, "first"), resumed, strict=True)]
    assert joined == expected, f"{case}: the losses differ\n{joined}\n{expected}"
    return "preempted"


def main(runs: int, seed: int, folder: Path, strategies: tuple[str, ...] = STRATEGIES) -> Counter[str]:
    torch.set_num_threads(1)
    chance, expected = random.Random(seed), {}
    outcomes: Counter[str] = Counter()
    for run in range(runs):
        strategy = strategies[run % len(strategies)]
        if strategy not in expected:
            assert wait_for(start(folder, strategy, strategy)) == [0, 0], "the uninterrupted run failed"
            expected[strategy] = losses_of(folder, strategy)
        outcomes[preempt(folder / str(run), strategy, expected[strategy], chance)] += 1
        print(f"run {run}, {strategy}: {dict(outcomes)}", flush=True)
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", nargs="*", default=STRATEGIES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(dict(main(arguments.runs, arguments.seed, Path(folder), tuple(arguments.strategies))))
