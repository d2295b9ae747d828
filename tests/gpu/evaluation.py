"""What users read besides weights, on CUDA: logged values and predictions of `paral_dp`, times of `ParalMonitor`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ParalMonitor
from tests.gpu.place import options_of, trainer_options
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

_NUM_STEPS, _NUM_PRODUCTS = 12, 20


def of_replicas(device: str) -> None:
    """Test and predict under `paral_dp`: logged values equal those of one process, predictions are in order."""
    from tests.distributed.dp.test_dp import NUM_SAMPLES, Logging, Scores, samples

    class Predicting(Scores):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return batch[0].sum(dim=1)

    torch.manual_seed(2)
    (expected,) = quiet_trainer(devices=1).test(model := Logging(), samples(), verbose=False)
    (metrics,) = quiet_trainer(**options_of("paral_dp", device)).test(model, samples(), verbose=False)
    assert metrics["held_out_num"] == NUM_SAMPLES
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    predictions = quiet_trainer(**options_of("paral_dp", device)).predict(Predicting(), samples())
    torch.testing.assert_close(torch.cat(predictions).cpu(), samples().dataset.tensors[1])


def precision_of_replicas(precision: str, device: str) -> None:
    """Train under `paral_dp` in low precision: every replica computes in it, on its own device."""
    dtype = torch.float16 if precision.startswith("16") else torch.bfloat16
    seen = set()

    class Watched(Regression):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.hidden(x)
            seen.add((hidden.dtype, hidden.device == self.device == x.device == self.hidden.weight.device))
            return self.out(torch.tanh(hidden))

    trainer = quiet_trainer(max_epochs=1, precision=precision, **options_of("paral_dp", device))
    trainer.fit(Watched(), regression_data(5, 1))
    assert seen == {(dtype, True)}


class _Heavy(Regression):
    """Takes long on the device, and does not wait for it."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean() + _products()[0, 0].detach() * 0.0


def _products() -> Tensor:
    matrix = torch.ones(4096, 4096, device="cuda")
    for _ in range(_NUM_PRODUCTS):
        matrix = matrix @ matrix * 1e-4
    return matrix


def monitor(device: str) -> None:
    """Fit with `ParalMonitor`: its times are those of the device, of which the host needs a fraction."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    _products()  # warms up
    events[0].record()
    _products()
    events[1].record()
    events[1].synchronize()
    callback: Any = ParalMonitor(every_n_steps=3)
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback], **trainer_options(device))
    trainer.fit(_Heavy(), regression_data(_NUM_STEPS, 1))
    report = callback.reports[0]
    assert report.num_steps == _NUM_STEPS - 1
    assert report.forward > events[0].elapsed_time(events[1]) / 1e3 / 2
    assert min(report.data, report.backward, report.optimizer, report.other) >= 0
    assert report.device_peak >= 2 * 4096 * 4096 * 4
