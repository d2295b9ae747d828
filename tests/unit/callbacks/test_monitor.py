"""`ParalMonitor` in one process."""

import time
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_paral import ConfigurationError, ParalMonitor
from tests.host_syncs import HostSyncs
from tests.models.regression import Regression, fit_regression, regression_data
from tests.running import quiet_trainer


def test_options_are_checked_and_removed_ones_are_unknown() -> None:
    with pytest.raises(ConfigurationError, match="every_n_steps=0"):
        ParalMonitor(every_n_steps=0)
    with pytest.raises(TypeError, match="plan"):
        ParalMonitor(plan=True)  # type: ignore[call-arg]


class Bar(TQDMProgressBar):
    """Remembers what it shows."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.shown = self.get_metrics(trainer, pl_module)


class SlowValidation(Regression):
    """Takes long to validate, and to end an epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.2)

    def on_train_epoch_end(self) -> None:
        time.sleep(0.2)


@pytest.mark.parametrize("shows", [True, False])
def test_step_time_is_without_validation_and_progress_bar_shows_it(shows: bool) -> None:
    monitor, bar = ParalMonitor(every_n_steps=4, planned_bytes=3 * 2**30, show_in_progress_bar=shows), Bar()
    trainer = quiet_trainer(
        devices=1, max_epochs=2, val_check_interval=2, enable_progress_bar=True, callbacks=[monitor, bar]
    )
    trainer.fit(SlowValidation(), regression_data(8, 1), regression_data(1, 1))

    assert 0 < monitor.values["paral/step_seconds"] < 0.1
    assert monitor.values["paral/planned_bytes"] == 3 * 2**30
    assert "paral/slowest_rank" not in monitor.values
    assert ("of 3.00 GiB planned" in str(bar.shown.get("paral"))) == shows
    assert "get_metrics" not in vars(bar)


def test_no_step_reads_a_tensor() -> None:
    syncs = HostSyncs()

    class Counting(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            syncs.is_counting = True

    with syncs.watched():
        fit_regression(10, 1, 1, callbacks=[ParalMonitor(every_n_steps=4), Counting()])

    assert not syncs.found
    assert syncs.num_elsewhere  # losses are read by the module
