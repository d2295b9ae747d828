"""Modules without an optimizer or parameters, and modules of earlier runs, train under ZeRO as in one process."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_paral import ConfigurationError, ParalZeROStrategy
from lightning_paral.engines.zero.user_access import Steps
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Evaluated(Regression):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def val_dataloader(self) -> Any:
        return regression_data(2, self.trainer.world_size)


class StepsTwice(Regression):
    """Two optimizer steps in each training step: the second forward pass must use the weights of the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


def losses_of_two_steps(strategy: str) -> list[float]:
    torch.manual_seed(3)
    model = StepsTwice()
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=strategy, precision="bf16-mixed")
    trainer.fit(model, regression_data(4, 2))
    return model.losses


@pytest.mark.parametrize("strategy", ["paral_zero2", "paral_zero3"])
def test_autocast_uses_the_weights_of_each_step(on_ranks, strategy: str) -> None:
    found, expected = (on_ranks(2, losses_of_two_steps, name) for name in (strategy, "paral_ddp"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.0)


class CountingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


class WithCounting(Regression):
    def configure_optimizers(self) -> Any:
        groups = [{"params": list(layer.parameters())} for layer in (self.hidden, self.out)]
        return CountingSGD(groups, lr=0.01)


def count_steps(stage: int) -> list[int] | str:
    strategy = ParalZeROStrategy(stage=stage, trust_optimizer=True)
    trainer = quiet_trainer(max_epochs=1, devices=1, strategy=strategy)
    try:
        trainer.fit(WithCounting(), regression_data(3, 1))
    except ConfigurationError as error:
        return str(error)
    return [group["count"] for group in trainer.optimizers[0].param_groups]


def test_optimizer_that_counts_in_its_groups_counts_once_or_is_refused() -> None:
    assert count_steps(2) == [3, 3]
    assert "CountingSGD changes count of its param_groups" in count_steps(3)


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


def without(strategy: str, num_ranks: int, folder: Path) -> list[float]:
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
    return losses


@pytest.mark.parametrize("strategy", ["paral_zero2", "paral_zero3"])
def test_fits_without_an_optimizer_and_without_parameters_run(on_ranks, tmp_path: Path, strategy: str) -> None:
    expected = without("auto", 1, tmp_path)
    for losses in on_ranks(2, without, strategy, 2, tmp_path):
        assert losses == pytest.approx(expected)


def test_module_inside_the_engine_has_attributes_and_keys_of_the_users() -> None:
    module = Regression()
    steps = Steps(module)
    assert steps.losses is module.losses
    assert list(steps.state_dict()) == list(module.state_dict())
    steps.load_state_dict(Regression().state_dict())
    with pytest.raises(AttributeError, match="'Regression' object has no attribute 'missing'"):
        steps.missing  # noqa: B018


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
    environment, filters, linear = dict(os.environ), list(warnings.filters), nn.functional.linear
    got = fits_with_one_part(("paral_zero3", "paral_ddp", "paral_zero3", "paral_zero2"))
    assert got == pytest.approx(fits_with_one_part(("auto",) * 4), rel=1e-4)
    assert "DS_ACCELERATOR" not in os.environ.keys() - environment.keys()
    assert warnings.filters == filters
    assert nn.functional.linear is linear  # DeepSpeed's gives gradients in another order
