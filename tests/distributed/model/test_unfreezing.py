"""Ranks that disagree about what is trained, and parameters added during a fit, are refused or made equal."""

from datetime import timedelta

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paral import ParalDDPStrategy
from lightning_paral.diagnostics.rank_pool import RankError
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


class FreezesAnotherOnEachRank(Backboned):
    """Freezes layers of the same shape between two batches of the last epoch: a reducer would mix their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.twins[1](self.twins[0](batch)), batch_idx)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1 and self.current_epoch == 1:
            self.twins[self.global_rank].requires_grad_(False)


class FrozenOnOneRankBetweenBatches(Backboned):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 1:
            self.backbone[0].weight.requires_grad_(False)


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
        (FreezesAnotherOnEachRank, "paral_ddp", "requires_grad=True of twins.1.weight exists on rank 0 only"),
        (FreezesAnotherOnEachRank, "paral_fsdp", "requires_grad=True of twins.1.weight exists on rank 0 only"),
        (Growing, "paral_fsdp", "were added to the module after FSDP sharded it: head.weight, head.bias"),
        (FreezesTheRest, "paral_ddp", "unused.weight, unused.bias. If"),
    ],
)
def test_is_refused_by_name(on_ranks, make: type[Backboned], strategy: str, words: str) -> None:
    for message in on_ranks(2, fit, make, strategy):
        assert words in message


def fit_until_timeout() -> None:
    strategy = ParalDDPStrategy(timeout=timedelta(seconds=3))
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1)
    trainer.fit(FrozenOnOneRankBetweenBatches(), DataLoader(ROWS, batch_size=4))


def test_single_rank_that_freezes_between_batches_raises(on_ranks) -> None:
    # The other rank waits in its backward pass until the pool kills it.
    with pytest.raises(RankError, match=r"requires_grad=True of backbone\.0\.weight exists on rank 0 only"):
        on_ranks(2, fit_until_timeout, timeout=300)


def test_new_parameters_are_rank_zeros_and_reduced_under_ddp(on_ranks) -> None:
    first, second = on_ranks(2, fit, Growing, "paral_ddp")

    assert first == second
