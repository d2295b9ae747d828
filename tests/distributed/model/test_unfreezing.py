"""Parameters that are frozen, unfrozen or added during a fit train as in one process, or are refused by name."""

from datetime import timedelta
from functools import cache

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
WITH_RANKS = [name for name in STRATEGIES if name != "paral_dp"]
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


def assert_equal(found: dict[str, Tensor] | str, expected: dict[str, Tensor]) -> None:
    assert isinstance(found, dict), found
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() < 1e-5, name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", WITH_RANKS)
def test_freezing_and_unfreezing_trains_as_in_one_process(on_ranks, name: str, schedule: str) -> None:
    for trained in on_ranks(2, fit, name, schedule):
        assert_equal(trained, fit_in_one_process(schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_freezing_and_unfreezing_trains_as_one_device_under_dp(schedule: str) -> None:
    assert_equal(fit("paral_dp", schedule), fit_in_one_process(schedule))


def test_fsdp_keeps_requires_grad_that_a_step_sets_on_unsharded_parameters(on_ranks) -> None:
    for trained in on_ranks(2, fit, "paral_fsdp", "unfreeze_inside_the_step"):
        assert_equal(trained, fit_in_one_process("unfreeze_inside_the_step"))


def test_ddp_names_parameters_that_are_unfrozen_too_late(on_ranks) -> None:
    for message in on_ranks(2, fit, "paral_ddp", "unfreeze_inside_the_step"):
        assert message.startswith("ConfigurationError: These parameters were unfrozen or added inside training_step")
        assert "backbone.0.weight, backbone.0.bias. Unfreeze" in message


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["unfreeze", "unfreeze_with_group", "unfreeze_inside_the_step"])
def test_zero_names_parameters_that_are_unfrozen(on_ranks, stage: int, schedule: str) -> None:
    for message in on_ranks(2, fit, f"paral_zero{stage}", schedule):
        assert message.startswith("ConfigurationError: These parameters require a gradient now")
        assert "backbone.0.weight" in message
        assert "paral_ddp" in message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_does_not_change_frozen_parameters(on_ranks, stage: int) -> None:
    for trained in on_ranks(2, fit, f"paral_zero{stage}", "freeze"):
        assert_equal(trained, fit_in_one_process("freeze"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_names_parameters_that_are_unfrozen_again_under_adam(on_ranks, stage: int) -> None:
    for message in on_ranks(2, fit, f"paral_zero{stage}", "freeze_and_unfreeze_between_batches"):
        assert "backbone.0.weight took 2 of" in message
        assert "paral_ddp" in message


@pytest.mark.parametrize("name", ["paral_ddp", "paral_fsdp"])
def test_ranks_that_disagree_raise(on_ranks, name: str) -> None:
    for message in on_ranks(2, fit, name, "on_one_rank"):
        assert "At batch 0 of epoch 1, the ranks do not train the same parameters: backbone.0.bias" in message
        assert "on rank 0 only" in message


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


def fit_growing(strategy: str) -> list[float] | str:
    torch.manual_seed(0)
    model = Growing("none")
    try:
        quiet_trainer(strategy=strategy, devices=2, max_epochs=3).fit(model, DataLoader(ROWS, batch_size=4))
    except ValueError as error:
        return str(error)
    return [float(p.detach().sum()) for p in model.parameters()]


def test_new_parameters_are_rank_zeros_and_reduced_under_ddp(on_ranks) -> None:
    first, second = on_ranks(2, fit_growing, "paral_ddp")

    assert first == second


def test_new_parameters_are_refused_under_fsdp(on_ranks) -> None:
    for message in on_ranks(2, fit_growing, "paral_fsdp"):
        assert "were added to the module after FSDP sharded it: head.weight, head.bias" in message


class FreezesTheRest(Backboned):
    """Freezes one layer after DDP's reducer is constructed, and does not use another."""

    def __init__(self) -> None:
        super().__init__("none")
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.backbone.requires_grad_(False)
        return loss


def fit_freezing_the_rest() -> str:
    try:
        quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1).fit(
            FreezesTheRest(), DataLoader(ROWS, batch_size=4)
        )
    except RuntimeError as error:
        return str(error)
    return "trained"


def test_unused_parameters_are_named_as_at_construction_of_the_reducer(on_ranks) -> None:
    for message in on_ranks(2, fit_freezing_the_rest):
        assert "unused.weight, unused.bias. If" in message
