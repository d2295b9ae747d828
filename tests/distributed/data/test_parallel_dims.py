"""Ranks that differ only in their tensor coordinate draw the same samples, and each sample counts once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric

from lightning_paral import ConfigurationError, ParalDDPStrategy
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


def test_ranks_of_one_data_rank_draw_and_decide_the_same_and_count_once(on_ranks) -> None:
    for strategy, num_ranks in ((InPairs, 4), (Together, 2)):
        ranks = on_ranks(num_ranks, fit, strategy, num_ranks)

        for (first, *found), (second, *_) in zip(ranks[::2], ranks[1::2], strict=True):
            assert first == second
            assert found == [[True, False, True, False], sum(range(8))]
        assert sorted(sample for samples, *_ in ranks[::2] for sample in samples) == list(range(8))


class OfRank(Dataset[Tensor]):
    """Has other values on each rank, of the same shape."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1,), float(dist.get_rank()))


def error_of_tensor_ranks() -> str:
    trainer = quiet_trainer(strategy="paral_tp", devices=2, max_epochs=1)
    with pytest.raises(ConfigurationError) as raised:
        trainer.fit(Linear(1), DataLoader(OfRank(), 4))
    return str(raised.value)


def test_different_batches_of_tensor_ranks_are_named(on_ranks) -> None:
    for message in on_ranks(2, error_of_tensor_ranks):
        assert "The tensor ranks have different batches in the first training_step" in message
        assert "call seed_everything() first" in message


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
