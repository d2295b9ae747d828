"""Parameters that are frozen, unfrozen or added during a fit train as in one process, or are refused by name."""

from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paral import ActivationCheckpointing, ParalDDPStrategy, ParalFSDPStrategy
from lightning_paral.errors import ParalError
from tests.rank_pool import RankError
from tests.running import quiet_trainer

STRATEGIES = {
    "paral_dp": lambda: "paral_dp",
    "paral_ddp": lambda: "paral_ddp",
    "paral_ddp_ring": lambda: "paral_ddp_ring",
    "no_bucket_view": lambda: ParalDDPStrategy(gradient_as_bucket_view=False),
    "static_graph": lambda: ParalDDPStrategy(static_graph=True),
    "find_unused": lambda: ParalDDPStrategy(find_unused_parameters=True),
    "checkpointing": lambda: ParalDDPStrategy(activation_checkpointing=ActivationCheckpointing(units=["Sequential"])),
    "paral_fsdp": lambda: "paral_fsdp",
    "fsdp_units": lambda: ParalFSDPStrategy(units=["Linear"]),
}
SCHEDULES = ("unfreeze", "unfreeze_with_group", "freeze", "freeze_and_unfreeze_between_batches")
ROWS = torch.randn(48, 4, generator=torch.Generator().manual_seed(5))


class Backboned(LightningModule):
    """Freezes and unfreezes its backbone by a schedule."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)
        self.schedule = schedule
        if schedule.startswith("unfreeze"):
            self.backbone.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.schedule == "freeze_inside_the_step_only":
            self.backbone.requires_grad_(False)
        if self.schedule == "unfreeze_inside_the_step" and self.current_epoch == 1:
            self.backbone.requires_grad_(True)
        return ((self.head(self.backbone(batch)) - batch) ** 2).mean()

    def on_train_epoch_start(self) -> None:
        if self.schedule in ("unfreeze", "unfreeze_with_group") and self.current_epoch == 1:
            self.backbone.requires_grad_(True)
            if self.schedule == "unfreeze_with_group":
                self.optimizers().add_param_group({"params": list(self.backbone.parameters()), "lr": 0.01})
        if self.schedule == "freeze":
            self.backbone.requires_grad_(self.current_epoch == 0)
        if self.schedule == "on_one_rank" and self.current_epoch == 1 and self.global_rank == 1:
            self.backbone.requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.schedule == "freeze_and_unfreeze_between_batches":
            if (self.current_epoch, batch_idx) == (0, 2):
                self.backbone.requires_grad_(False)
            if (self.current_epoch, batch_idx) == (1, 1):
                self.backbone.requires_grad_(True)
        if self.schedule == "on_one_rank_between_batches" and batch_idx == 1 and self.global_rank == 1:
            self.backbone[0].weight.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = self.head.parameters() if self.schedule == "unfreeze_with_group" else self.parameters()
        return torch.optim.Adam(trained, lr=0.05)


def fit(name: str | None, schedule: str, devices: int = 2) -> dict[str, Tensor] | str:
    torch.manual_seed(0)
    model = Backboned(schedule)
    strategy = "auto" if name is None else STRATEGIES[name]() if name in STRATEGIES else name
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=3)
    per_rank = 8 if name in (None, "paral_dp") else 4
    try:
        trainer.fit(model, DataLoader(ROWS, batch_size=per_rank))
    except ParalError as error:
        return f"{type(error).__name__}: {error}"
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@cache
def fit_in_one_process(schedule: str) -> dict[str, Tensor]:
    trained = fit(None, schedule, 1)
    assert isinstance(trained, dict)
    return trained


ZERO = ("paral_zero1", "paral_zero2", "paral_zero3")
TRAINED = [
    *((name, schedule) for name in STRATEGIES for schedule in SCHEDULES),
    ("paral_fsdp", "unfreeze_inside_the_step"),
    *((name, "freeze") for name in ZERO),
]


@pytest.mark.parametrize(("name", "schedule"), TRAINED)
def test_freezing_and_unfreezing_trains_as_in_one_process(on_ranks, name: str, schedule: str) -> None:
    ranks = [fit(name, schedule)] if name == "paral_dp" else on_ranks(2, fit, name, schedule)
    for found in ranks:
        assert isinstance(found, dict), found
        for key, weight in fit_in_one_process(schedule).items():
            assert (found[key] - weight).abs().max() < 1e-5, key


LATE = ("ConfigurationError: These parameters were unfrozen", "inside training_step", "backbone.0.bias. Unfreeze")
NOT_BY_ZERO = ("ConfigurationError: These parameters require a gradient now", "backbone.0.weight", "paral_ddp")
REFUSED: list[tuple[str, str, tuple[str, ...]]] = [
    ("paral_ddp", "unfreeze_inside_the_step", LATE),
    *((name, f"unfreeze{how}", NOT_BY_ZERO) for name in ZERO for how in ("", "_with_group", "_inside_the_step")),
    *((name, SCHEDULES[-1], ("backbone.0.weight took 2 of", "paral_ddp")) for name in ZERO),
    *(
        (name, "on_one_rank", ("At batch 0 of epoch 1, the ranks do not train the same parameters", "on rank 0 only"))
        for name in ("paral_ddp", "paral_fsdp")
    ),
]


@pytest.mark.parametrize(("name", "schedule", "words"), REFUSED)
def test_parameters_that_cannot_change_are_named(on_ranks, name: str, schedule: str, words: tuple[str, ...]) -> None:
    for message in on_ranks(2, fit, name, schedule):
        assert "backbone.0." in message
        assert all(part in message for part in words), message


def fit_with_one_rank_frozen_between_batches() -> None:
    torch.manual_seed(0)
    model = Backboned("on_one_rank_between_batches")
    strategy = ParalDDPStrategy(timeout=timedelta(seconds=3))
    quiet_trainer(strategy=strategy, devices=2, max_epochs=1).fit(model, DataLoader(ROWS, batch_size=4))


def test_single_rank_that_freezes_between_batches_raises(on_ranks) -> None:
    # The other rank waits in its backward pass until the pool kills it.
    with pytest.raises(
        RankError, match=r"requires_grad of backbone\.0\.weight changed on this rank, but not on rank 0"
    ):
        on_ranks(2, fit_with_one_rank_frozen_between_batches, timeout=300)


def finetune_backbone(strategy: str) -> list[float]:
    torch.manual_seed(0)
    model = Backboned("by a callback")
    callback = BackboneFinetuning(1, lambda epoch: 2.0, verbose=False)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=3, callbacks=[callback])
    model.configure_optimizers = lambda: torch.optim.Adam(  # type: ignore[method-assign]
        [p for p in model.parameters() if p.requires_grad], lr=0.05
    )
    trainer.fit(model, DataLoader(ROWS, batch_size=4))
    return [float(p.detach().sum()) for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_ddp_ring", "paral_fsdp"])
def test_ranks_agree_after_lightnings_backbone_finetuning(on_ranks, strategy: str) -> None:
    first, second = on_ranks(2, finetune_backbone, strategy)

    assert first == second


class Growing(Backboned):
    """Adds a layer in its second epoch, with different values on each rank."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(self.global_rank)
            self.head = nn.Linear(8, 4)
            self.optimizers().add_param_group({"params": list(self.head.parameters())})


def fit_kind(kind: type[Backboned], strategy: str) -> list[float] | str:
    torch.manual_seed(0)
    model = kind("none")
    try:
        quiet_trainer(strategy=strategy, devices=2, max_epochs=2).fit(model, DataLoader(ROWS, batch_size=4))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return [float(p.detach().sum()) for p in model.parameters()]


def test_new_parameters_are_rank_zeros_and_reduced_under_ddp(on_ranks) -> None:
    first, second = on_ranks(2, fit_kind, Growing, "paral_ddp")

    assert isinstance(first, list)
    assert first == second


class FreezesTheRest(Backboned):
    """Freezes one layer after DDP's reducer is constructed, and does not use another."""

    def __init__(self, schedule: str) -> None:
        super().__init__(schedule)
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.backbone.requires_grad_(False)
        return loss


@pytest.mark.parametrize(
    ("kind", "strategy", "words"),
    [
        (Growing, "paral_fsdp", "were added to the module after FSDP sharded it: head.weight, head.bias"),
        (FreezesTheRest, "paral_ddp", "unused.weight, unused.bias. If"),  # as when the reducer is constructed
    ],
)
def test_new_and_unused_parameters_are_named(on_ranks, kind: Any, strategy: str, words: str) -> None:
    for message in on_ranks(2, fit_kind, kind, strategy):
        assert words in message
