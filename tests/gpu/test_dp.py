"""The DP contracts on CUDA: on each GPU, at most four; with a single one, two replicas share it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ParalDPStrategy
from tests.distributed.dp.test_dp import NUM_SAMPLES, Logging, Scores, assert_same_weights, fitted, samples
from tests.gpu.rounding import with_sgd
from tests.models.blocks import MODULES
from tests.models.regression import fit_regression
from tests.models.several_optimizers import Toggled
from tests.models.tokens import fit
from tests.running import quiet_trainer

NUM_GPUS = min(torch.cuda.device_count(), 4)
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device")
DEVICES = [torch.device("cuda", index % max(NUM_GPUS, 1)) for index in range(max(NUM_GPUS, 2))]


def on_gpus(**options: Any) -> dict[str, Any]:
    return {"accelerator": "gpu", "strategy": ParalDPStrategy(parallel_devices=DEVICES), **options}


def fit_scores(make: Any, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(2)
    trainer = quiet_trainer(**({"max_epochs": 2, "devices": 1} | options))
    return trainer, fitted(trainer, make())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_equals_one_process(accumulate: int) -> None:
    _, expected = fit_regression(20, accumulate, 1)

    _, weights = fit_regression(20, accumulate, 1, **on_gpus())

    assert_same_weights(weights, expected)


@pytest.mark.parametrize("name", ["Contrastive", "Decayed", "Tied", "GPT2", "T5"])
def test_module_trains_as_in_one_process(name: str) -> None:
    make = with_sgd(MODULES[name])
    _, expected = fit(make, 5, 1, gradient_clip_val=0.5)

    _, weights = fit(make, 5, 1, gradient_clip_val=0.5, **on_gpus())

    assert_same_weights({key: weight.cpu() for key, weight in weights.items()}, expected, tolerance=1e-4)


def test_gan_trains_as_in_one_process() -> None:
    _, expected = fit_scores(Toggled, accelerator="gpu")  # Adam: on the same device, see tests.gpu.rounding

    _, weights = fit_scores(Toggled, **on_gpus())

    assert_same_weights(weights, expected)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16), ("bf16-true", torch.bfloat16)]
)
def test_low_precision_reaches_every_replica(precision: str, dtype: torch.dtype) -> None:
    seen = set()

    class Watched(Scores):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.hidden(x)
            seen.add((hidden.dtype, hidden.device == self.device == x.device == self.hidden.weight.device))
            return self.out(hidden.tanh()).squeeze(1)

    _, expected = fit_scores(Watched, accelerator="gpu", precision=precision)
    seen.clear()
    _, weights = fit_scores(Watched, **on_gpus(precision=precision))

    assert seen == {(dtype, True)}
    assert_same_weights(weights, expected, tolerance=3e-2)


def test_logged_values_and_metrics_equal_those_of_one_process() -> None:
    torch.manual_seed(2)
    (expected,) = quiet_trainer(devices=1).test(model := Logging(), samples(), verbose=False)

    (metrics,) = quiet_trainer(**on_gpus()).test(model, samples(), verbose=False)

    assert metrics["held_out_num"] == NUM_SAMPLES
    for name, value in metrics.items():
        assert value == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


def test_predictions_are_returned_in_order() -> None:
    class Predicting(Scores):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return batch[0].sum(dim=1)

    predictions = quiet_trainer(**on_gpus()).predict(Predicting(), samples())

    torch.testing.assert_close(torch.cat(predictions).cpu(), samples().dataset.tensors[1])
