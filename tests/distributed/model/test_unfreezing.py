"""Ranks that disagree about what is trained, and parameters added during a fit, are refused or made equal."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.running import quiet_trainer

ROWS = torch.randn(48, 4, generator=torch.Generator().manual_seed(5))


class Backboned(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return ((self.head(self.backbone(batch)) - batch) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class FrozenOnOneRank(Backboned):
    def on_train_epoch_start(self) -> None:
        self.backbone.requires_grad_(self.current_epoch == 0 or self.global_rank == 0)


class Growing(Backboned):
    """Adds a layer in its second epoch, with different values on each rank."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(self.global_rank)
            self.head = nn.Linear(8, 4)
            self.optimizers().add_param_group({"params": list(self.head.parameters())})


class FreezesTheRest(Backboned):
    """Freezes one layer after DDP's reducer is constructed, and does not use another."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.backbone.requires_grad_(batch_idx == 0)
        return loss


def fit(make: type[Backboned], strategy: str) -> list[float] | str:
    torch.manual_seed(0)
    model = make()
    try:
        quiet_trainer(strategy=strategy, devices=2, max_epochs=2).fit(model, DataLoader(ROWS, batch_size=4))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return [float(p.detach().sum()) for p in model.parameters()]


@pytest.mark.parametrize(
    ("make", "strategy", "words"),
    [
        (FrozenOnOneRank, "paral_ddp", "requires_grad=True of backbone.0.weight exists on rank 0 only"),
        (FrozenOnOneRank, "paral_fsdp", "requires_grad=True of backbone.0.weight exists on rank 0 only"),
        (Growing, "paral_fsdp", "were added to the module after FSDP sharded it: head.weight, head.bias"),
        (FreezesTheRest, "paral_ddp", "unused.weight, unused.bias. If"),
    ],
)
def test_is_refused_by_name(on_ranks, make: type[Backboned], strategy: str, words: str) -> None:
    for message in on_ranks(2, fit, make, strategy):
        assert words in message


def test_new_parameters_are_rank_zeros_and_reduced_under_ddp(on_ranks) -> None:
    first, second = on_ranks(2, fit, Growing, "paral_ddp")

    assert first == second
