"""`ParalMonitor` on CUDA: times of the device."""

import pytest
import torch
from torch import Tensor

from lightning_paral import ParalMonitor
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NUM_STEPS, NUM_PRODUCTS = 12, 20


class Heavy(Regression):
    """Takes long on the device, and does not wait for it."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        matrix = torch.ones(4096, 4096, device=self.device)
        for _ in range(NUM_PRODUCTS):
            matrix = matrix @ matrix * 1e-4
        return self(batch[0]).square().mean() + matrix[0, 0].detach() * 0.0


def seconds_of_products() -> float:
    matrix = torch.ones(4096, 4096, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(NUM_PRODUCTS):
        matrix = matrix @ matrix * 1e-4
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3


def test_times_are_those_of_the_device() -> None:
    seconds_of_products()  # warms up
    expected = seconds_of_products()
    monitor = ParalMonitor(every_n_steps=3)
    trainer = quiet_trainer(accelerator="gpu", devices=1, max_epochs=1, callbacks=[monitor])
    trainer.fit(Heavy(), regression_data(NUM_STEPS, 1))
    report = monitor.reports[0]

    assert report.num_steps == NUM_STEPS - 1
    assert report.forward > expected / 2  # the host needs a fraction of it to launch the kernels
    assert min(report.data, report.backward, report.optimizer, report.other) >= 0
    assert report.device_peak is not None
    assert report.device_peak >= 2 * 4096 * 4096 * 4
