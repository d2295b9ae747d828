"""Ranks whose data differ are an error before the first step, which names the difference and a remedy."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from lightning_paral.errors import ConfigurationError
from tests.models.linear import Linear
from tests.running import quiet_trainer


class Summing(Linear):
    def __init__(self) -> None:
        super().__init__(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


def dataset_of(kind: str) -> Dataset[Any]:
    numbers = TensorDataset(torch.arange(16.0)[:, None])
    if kind == "split":
        return random_split(numbers, [12, 4], generator=torch.Generator().manual_seed(dist.get_rank()))[0]
    if kind == "nested":
        later = [0, 1, 2, 3, 4 + dist.get_rank()]
        return ConcatDataset([Subset(numbers, range(12)), Subset(numbers, later)])
    return TensorDataset(torch.zeros(16 + 4 * dist.get_rank(), 1))


def error_of(strategy: str, dataset: Any) -> str:
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1)
    with pytest.raises(ConfigurationError) as raised:
        trainer.fit(Summing(), DataLoader(dataset, 4))
    return str(raised.value)


def error_of_kind(kind: str) -> str:
    return error_of("paral_ddp", dataset_of(kind))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("split", "The loader's Subset has indices ["),
        ("nested", "The loader's ConcatDataset, its Subset 1 has indices [0, 1, 2, 3, 4]"),
        ("length", "The loader's TensorDataset has length 16 on rank 0 and 20 on rank 1"),
    ],
)
def test_differences_are_named_on_every_rank(on_ranks, kind: str, words: str) -> None:
    for message in on_ranks(2, error_of_kind, kind):
        assert words in message
        assert "call seed_everything() first" in message


def fit_without_distribution() -> int:
    trainer = quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Summing(), DataLoader(dataset_of("split"), 1))
    return trainer.global_step


def test_ranks_may_differ_if_the_user_distributes_the_data(on_ranks) -> None:
    assert on_ranks(2, fit_without_distribution) == [12, 12]


class Repeats(Dataset[Any]):
    """Has other values on each rank, of the same shape."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return (torch.full((1,), float(dist.get_rank())),)


def test_different_batches_of_tensor_ranks_are_named(on_ranks) -> None:
    for message in on_ranks(2, error_of, "paral_tp", Repeats()):
        assert "The tensor ranks have different batches in the first training_step" in message
        assert "call seed_everything() first" in message
