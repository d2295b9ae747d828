"""All ranks evaluate rank 0's model, and keep buffers of their own on request."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.contract.cases import MAIN, labels, strategy_of, with_ranks
from tests.running import quiet_trainer

STRATEGIES = (*labels(with_ranks(MAIN, 2)), "paral_ddp_ring")


class Counting(LightningModule):
    """Has a buffer that depends on the batches of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.sum(dim=0)
        return (self.layer(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def seen_by(label: str) -> list[float]:
    model = Counting()
    trainer = quiet_trainer(strategy=strategy_of(label, broadcast_buffers=False), devices=2, max_epochs=1)
    trainer.fit(model, DataLoader(torch.arange(64.0).view(16, 4) / 64, batch_size=4))
    return model.seen.tolist()


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero1"])
def test_ranks_keep_their_own_buffers_on_request(on_ranks, strategy: str) -> None:
    first, second = on_ranks(2, seen_by, strategy)

    assert first != second


class Unseeded(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("noise", torch.randn(3))
        self.seen: list[float] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen = [float(self.layer(torch.ones(4)).sum()), float(self.noise.sum())]


def validate_unseeded(label: str) -> list[float]:
    trainer = quiet_trainer(strategy=strategy_of(label), devices=2)
    torch.manual_seed(trainer.global_rank)
    model = Unseeded()
    trainer.validate(model, DataLoader(torch.randn(8, 4), batch_size=4), verbose=False)
    return model.seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_evaluate_rank_zeros_model(on_ranks, strategy: str) -> None:
    first, second = on_ranks(2, validate_unseeded, strategy)

    assert first == second
