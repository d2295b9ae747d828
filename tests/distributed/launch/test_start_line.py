"""A fit first prints one line with strategy, ranks, backend, precision, split and batch size."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_paral import ParalDDPStrategy, ParalDPStrategy, ParalFSDPStrategy, ParalZeROStrategy
from tests.models.regression import FEATURES, Regression
from tests.running import logged, quiet_trainer


def batches(batch_size: int | None = 4) -> DataLoader[Any]:
    dataset = TensorDataset(torch.ones(16, FEATURES), torch.ones(16, 2))
    return DataLoader(dataset, batch_size) if batch_size else DataLoader(dataset, batch_sampler=Ragged())


class Ragged:
    """A batch sampler with batches of different sizes."""

    def __iter__(self) -> Any:
        return iter([[0, 1, 2], [3, 4], [5], [6]])

    def __len__(self) -> int:
        return 4


class Both(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


def printed(strategy: Callable[[], Any], loaders: Any, several: bool = False, **options: Any) -> list[str]:
    """Fit twice; return the start line of each fit on this rank."""
    with logged("lightning.pytorch.utilities.rank_zero") as messages:
        for _ in range(2):
            module = Both() if several else Regression()
            quiet_trainer(strategy=strategy(), devices=2, max_steps=1, **options).fit(module, loaders)
    return [line for line in messages if re.match(r"paral_\w+: \d", line)]


def on_rank() -> dict[str, list[str]]:
    accumulated = {"accumulate_grad_batches": 2}
    found = {
        "ddp": printed(ParalDDPStrategy, batches()),
        "global": printed(lambda: ParalDDPStrategy(split="global"), batches()),
        "fsdp": printed(ParalFSDPStrategy, batches(), precision="bf16-mixed", **accumulated),
        "zero": printed(lambda: ParalZeROStrategy(stage=1), batches(None)),
        "several": printed(lambda: "paral_ddp", [batches(4), batches(2)], several=True, **accumulated),
    }
    assert dist.get_world_size() == 2
    return found


def test_start_line_describes_the_run(on_ranks) -> None:
    first, second = on_ranks(2, on_rank)

    replicas, shards = "2 ranks (2 replicas) on 1 node, gloo", "2 ranks (2 shards) on 1 node, gloo"
    lines = {case: set(said) for case, said in first.items()}
    assert lines == {
        "ddp": {f'paral_ddp: {replicas}, 32-true, split="batch", global batch size 8'},
        "global": {f'paral_ddp: {replicas}, 32-true, split="global", global batch size 4'},
        "fsdp": {f'paral_fsdp: {shards}, bf16-mixed, split="batch", global batch size 8, 2 batches accumulated'},
        "zero": {f'paral_zero1: {shards}, 32-true, split="batch"'},
        "several": {f'paral_ddp: {replicas}, 32-true, split="batch", global batch size 8 and 4, 2 batches accumulated'},
    }
    assert {len(said) for said in first.values()} == {2}  # one a fit
    assert not any(second.values())


def test_start_line_of_one_process() -> None:
    assert set(printed(ParalDPStrategy, batches())) == {"paral_dp: 2 devices, cpu, 32-true, global batch size 4"}
