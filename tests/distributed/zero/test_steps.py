"""Ordinary steps, closures, optimizers and modules train under ZeRO as in one process."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.models.regression import Regression, regression_data
from tests.running import assert_same_fit, quiet_trainer

STAGES = ("paral_zero1", "paral_zero2", "paral_zero3")


class Noting(Regression):
    """Records the calls of hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_after_backward(self) -> None:
        self.calls.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("on_before_zero_grad")


def fit(kind: type[Noting], strategy: str, num_ranks: int, **options: Any) -> tuple[Any, list[Any]]:
    torch.manual_seed(3)
    model = kind()
    trainer = quiet_trainer(**({"max_epochs": 1, "devices": num_ranks, "strategy": strategy} | options))
    trainer.fit(model, regression_data(6, num_ranks))
    fitted = model.losses, {name: weight.clone() for name, weight in model.state_dict().items()}
    return fitted, [*model.calls, trainer.global_step]


# A step without a loss: Lightning allows it in one process


class NoLoss(Noting):
    """Returns no loss for some batches, and lowers the learning rate in every step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 0 else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("strategy", STAGES)
def test_step_without_a_loss_changes_nothing(strategy: str) -> None:
    for options in ({"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 3}):
        expected, calls = fit(NoLoss, "auto", 1, **options)
        got, got_calls = fit(NoLoss, strategy, 1, **options)
        assert_same_fit([got], expected)
        assert got_calls == calls


class ClosureNever(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step()


class WithClosureNever(Noting):
    def configure_optimizers(self) -> Any:
        return ClosureNever(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["paral_zero2", "paral_zero3"])
def test_closure_that_is_never_called_is_lightnings_error(strategy: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"The closure hasn't been executed"):
        fit(WithClosureNever, strategy, 1)


# Without an optimizer, without parameters


class Evaluated(Noting):
    """Records the mode in which it runs."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)
        self.calls.append(
            (self.training, self.trainer.model.training, self.trainer.model is self.trainer.strategy.model)
        )

    def val_dataloader(self) -> Any:
        return regression_data(2, self.trainer.world_size)


class NoOptimizer(Evaluated):
    def configure_optimizers(self) -> None:  # type: ignore[override]
        return None


class Counting(LightningModule):
    """Has no parameters, and counts batches in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen += 1

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("seen", self.seen + batch_idx, sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return batch[0].sum()

    def configure_optimizers(self) -> None:
        return None


def without(strategy: str, num_ranks: int, folder: Path) -> Any:
    options = {"max_epochs": 1, "devices": num_ranks, "strategy": strategy}
    torch.manual_seed(3)
    model, trainer = NoOptimizer(), quiet_trainer(**options, gradient_clip_val=0.1)
    model.on_train_epoch_end = lambda: trainer.save_checkpoint(folder / f"{strategy}.ckpt")  # type: ignore[method-assign]
    trainer.fit(model, regression_data(3, num_ranks))
    losses = [float(trainer.callback_metrics["loss"]), float(trainer.validate(model, verbose=False)[0]["loss"])]
    counting, trainer = Counting(), quiet_trainer(**options)
    data = regression_data(2, num_ranks)
    losses.append(float(trainer.validate(counting, data, verbose=False)[0]["seen"]))
    trainer.fit(counting, data, data)
    losses += [float(counting.seen), float(trainer.validate(counting, data, verbose=False)[0]["seen"])]
    assert len(trainer.predict(counting, data) or ()) == 2
    return losses, model.calls


@pytest.mark.parametrize("strategy", ["paral_zero2", "paral_zero3"])
def test_fits_without_an_optimizer_and_without_parameters_run(on_ranks, tmp_path: Path, strategy: str) -> None:
    expected, calls = without("auto", 1, tmp_path)
    for losses, got in on_ranks(2, without, strategy, 2, tmp_path):
        assert losses == pytest.approx(expected)
        assert [call for call in got if not isinstance(call, tuple)] == [c for c in calls if not isinstance(c, tuple)]
        assert {call for call in got if isinstance(call, tuple)} == {(False, False, True)}


# One process, several runs


class WithShared(Evaluated):
    """Calls twice a module that other modules share."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.again = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.shared(self.again(self.hidden(x)))))


def fits_with_one_part(strategies: tuple[str, ...]) -> list[float]:
    torch.manual_seed(5)
    part, losses = nn.Linear(32, 32), []
    whole = WithShared(part)
    for strategy in strategies:
        for model in (whole, WithShared(part)):
            trainer = quiet_trainer(max_epochs=1, devices=1, strategy=strategy)
            trainer.fit(model, regression_data(2, 1))
            trainer.validate(model, verbose=False)
            losses += model.losses
    return losses


def test_module_can_be_used_in_further_runs_and_under_other_strategies() -> None:
    environment, filters = dict(os.environ), list(warnings.filters)
    got = fits_with_one_part(("paral_zero3", "paral_ddp", "paral_zero3", "paral_zero2"))
    assert got == pytest.approx(fits_with_one_part(("auto",) * 4), rel=1e-4)
    assert "DS_ACCELERATOR" not in os.environ.keys() - environment.keys()
    assert warnings.filters == filters


def test_warnings_of_libraries_are_suppressed_and_those_of_users_are_not() -> None:
    class Warns(Evaluated):
        def on_train_batch_start(self, *_: Any) -> None:
            warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Warns, "paral_zero3", 1)
    kinds = [warning for warning in caught if issubclass(warning.category, FutureWarning | DeprecationWarning)]
    assert {warning.filename for warning in kinds} == {__file__}
    assert len(kinds) == 6
