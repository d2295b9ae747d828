"""Under ZeRO users see torch's optimizer: the LR finder, monitors, schedulers and callbacks work as under DDP."""

import tempfile
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

from lightning_paral.errors import ConfigurationError
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

SCHEDULERS = {
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=6),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 1e-3, 1e-1, step_size_up=2),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
}


class Tuned(Regression):
    """Trains by SGD with momentum, a learning rate that tuners may set, and a scheduler of SCHEDULERS."""

    def __init__(self, scheduler: str | None = None) -> None:
        super().__init__()
        self.lr = 1e-3
        self.scheduler = scheduler

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.01)
        if self.scheduler is None:
            return optimizer
        return [optimizer], [{"scheduler": SCHEDULERS[self.scheduler](optimizer), "interval": "step"}]


class SlowingDown(Callback):
    """Sets the learning rate in the parameter group and checks the optimizer."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        (optimizer,) = trainer.optimizers
        assert type(optimizer) is torch.optim.SGD
        assert optimizer.defaults["momentum"] == 0.9
        assert {*map(id, optimizer.param_groups[0]["params"])} == {*map(id, pl_module.parameters())}
        optimizer.param_groups[0]["lr"] *= 0.9


def weights_of(model: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trainer_of(strategy: str, num_ranks: int, **options: Any) -> Any:
    folder = tempfile.mkdtemp()
    return quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy, default_root_dir=folder, **options)


def find_rates(strategy: str, num_ranks: int) -> Any:
    torch.manual_seed(3)
    model = Tuned()
    before = weights_of(model)
    trainer = trainer_of(strategy, num_ranks)
    found = Tuner(trainer).lr_find(model, regression_data(14, num_ranks), num_training=14)
    assert found is not None
    assert torch.equal(weights_of(model), before)
    assert (trainer.global_step, trainer.current_epoch) == (0, 0)
    trainer.fit(model, regression_data(3, num_ranks))
    callback = Tuned()
    finder = LearningRateFinder(num_training_steps=14)
    torch.manual_seed(3)
    trainer_of(strategy, num_ranks, callbacks=[finder], limit_train_batches=14).fit(
        callback, regression_data(14, num_ranks)
    )
    return found.results["loss"], model.lr, callback.lr, weights_of(model), trainer.global_step


def watch_rates(strategy: str, num_ranks: int) -> Any:
    seen = []
    for scheduler in (None, *SCHEDULERS):
        torch.manual_seed(3)
        model = Tuned(scheduler)
        monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        callbacks = [monitor] if scheduler else [monitor, SlowingDown()]
        logger = CSVLogger(tempfile.mkdtemp())
        trainer = trainer_of(strategy, num_ranks, callbacks=callbacks, logger=logger, log_every_n_steps=1)
        trainer.fit(model, regression_data(6, num_ranks))
        seen.append((monitor.lrs, monitor.last_momentum_values, monitor.last_weight_decay_values, weights_of(model)))
    return seen


STRATEGIES = ("paral_zero1", "paral_zero3", "paral_fsdp")


@pytest.mark.parametrize("what", [find_rates, watch_rates])
def test_callbacks_and_schedulers_act_as_under_ddp(on_ranks, what: Any) -> None:
    expected = on_ranks(2, what, "paral_ddp", 2)
    for strategy in STRATEGIES:
        torch.testing.assert_close(on_ranks(2, what, strategy, 2), expected, rtol=1e-4, atol=1e-5)
    alone = on_ranks(1, what, "paral_zero2", 1)
    torch.testing.assert_close(alone, on_ranks(1, what, "paral_ddp", 1), rtol=1e-4, atol=1e-5)


class Growing(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def grow() -> None:
    with pytest.raises(ConfigurationError, match="had 1 parameter groups when the run began, and has 2 now"):
        trainer_of("paral_zero2", 1, callbacks=[Growing()]).fit(Tuned(), regression_data(3, 1))


def test_new_parameter_group_is_refused(on_ranks) -> None:
    on_ranks(1, grow)
