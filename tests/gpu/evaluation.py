"""What users read besides weights, on CUDA: logged values and predictions of `paral_dp`."""

import pytest
import torch
from torch import Tensor

from tests.gpu.place import options_of
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


def of_replicas(device: str) -> None:
    """Test and predict under `paral_dp`: logged values equal those of one process, predictions are in order."""
    from tests.distributed.dp.test_dp import Scores, samples

    class Predicting(Scores):
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("loss", super().training_step(batch, batch_idx))
            self.log("num", float(len(batch[0])), reduce_fx="sum")

        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return batch[0].sum(dim=1)

    torch.manual_seed(2)
    (expected,) = quiet_trainer(devices=1).test(model := Predicting(), samples(), verbose=False)
    (metrics,) = quiet_trainer(**options_of("paral_dp", device)).test(model, samples(), verbose=False)
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)
    predictions = quiet_trainer(**options_of("paral_dp", device)).predict(model, samples())
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
