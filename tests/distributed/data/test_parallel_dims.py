"""Ranks that differ only in their tensor coordinate draw the same samples, and each sample counts once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.datapipes.iter import IterableWrapper
from torchmetrics import SumMetric

from lightning_paral import ParalDDPStrategy
from lightning_paral.data.loaders import seed_workers_by_data_rank
from lightning_paral.distributed.mesh import ParallelDims
from tests.models.linear import Linear
from tests.running import quiet_trainer


class InPairs(ParalDDPStrategy):
    """Two neighboring ranks compute the same, as in tensor parallelism, but with undivided layers."""

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(rank=self.global_rank, replicate=self.world_size // 2, tensor=2)


class Together(ParalDDPStrategy):
    """All ranks compute the same."""

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(rank=self.global_rank, tensor=self.world_size)


class Recording(Linear):
    """Records samples and decisions. Its random generators differ between ranks when the order of samples is drawn."""

    def __init__(self) -> None:
        super().__init__(1, lr=0.01)
        self.total = SumMetric()
        self.samples: list[float] = []
        self.decisions: list[bool] = []

    def train_dataloader(self) -> DataLoader[Any]:
        torch.rand(self.global_rank)
        return DataLoader(torch.arange(8.0).view(8, 1), batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(8.0).view(8, 1), batch_size=4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.samples += batch.flatten().tolist()
        return self.layer(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.total.update(batch)
        self.log("total", self.total)

    def on_train_end(self) -> None:
        decide = self.trainer.strategy.reduce_boolean_decision
        on_one, on_all = self.global_rank == 1, True
        self.decisions = [decide(on_all), decide(on_one), decide(on_one, all=False), decide(not on_all, all=False)]


def fit(strategy: type[ParalDDPStrategy], num_ranks: int) -> tuple[list[float], list[bool], float]:
    torch.manual_seed(0)
    trainer = quiet_trainer(strategy=strategy(split="global"), devices=num_ranks, max_epochs=1, num_sanity_val_steps=0)
    module = Recording()
    trainer.fit(module)
    return module.samples, module.decisions, float(trainer.callback_metrics["total"])


def test_ranks_of_one_data_rank_draw_the_same_samples_though_their_generators_differ(on_ranks) -> None:
    ranks = [samples for samples, _, _ in on_ranks(4, fit, InPairs, 4)]

    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert sorted(ranks[0] + ranks[2]) == list(range(8))


def test_ranks_that_all_compute_the_same_count_samples_once(on_ranks) -> None:
    (first, _, total), (second, _, other_total) = on_ranks(2, fit, Together, 2)

    assert first == second
    assert sorted(first) == list(range(8))
    assert total == other_total == sum(range(8))


@pytest.mark.parametrize(("strategy", "num_ranks"), [(InPairs, 4), (Together, 2)])
def test_decisions_are_those_of_all_ranks(on_ranks, strategy: type[ParalDDPStrategy], num_ranks: int) -> None:
    for _, decisions, _ in on_ranks(num_ranks, fit, strategy, num_ranks):
        assert decisions == [True, False, True, False]


def samples_of_data_pipe() -> list[float]:
    module = Recording()
    loader = DataLoader(IterableWrapper([torch.full((1,), float(i)) for i in range(8)]).sharding_filter(), batch_size=2)
    trainer = quiet_trainer(strategy=InPairs(), devices=4, max_epochs=1, limit_val_batches=0)
    trainer.fit(module, loader)
    return module.samples


def test_data_pipes_are_divided_among_the_data_ranks(on_ranks) -> None:
    assert on_ranks(4, samples_of_data_pipe) == [[0, 1, 4, 5]] * 2 + [[2, 3, 6, 7]] * 2


class Draws(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(())


def drawn_by_rank(init: Any) -> list[list[float]]:
    """Return what workers draw on four ranks, of which two neighboring ones have the same data rank."""
    found = []
    for rank in range(4):
        torch.manual_seed(1)
        loader = DataLoader(Draws(), num_workers=1, worker_init_fn=init)
        loader = seed_workers_by_data_rank(loader, ParallelDims(rank=rank, replicate=2, tensor=2))
        found.append(torch.cat(list(loader)).tolist())
    return found


def shift_seed(worker_id: int) -> None:
    torch.manual_seed(torch.initial_seed() + 1)


@pytest.mark.parametrize("seeds_workers", ["0", "1"])
@pytest.mark.parametrize("init", [None, shift_seed])
def test_workers_are_seeded_by_the_data_rank(monkeypatch: pytest.MonkeyPatch, seeds_workers: str, init: Any) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", seeds_workers)

    first, second, third, fourth = drawn_by_rank(init)

    assert first == second
    assert third == fourth
    assert not set(first) & set(third)
