"""fp16 autocast under ZeRO adapts the loss scale, and clips unscaled gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral.engines.zero.optimizer import DynamicLossScale
from lightning_paral.engines.zero.options import ZeROOptions
from tests.models.regression import Regression, regression_data
from tests.running import assert_same_fit, quiet_trainer

NUM_STEPS = 12
OVERFLOWING = 5  # the batch whose scaled gradients overflow
LARGE = 1e30


class Overflowing(Regression):
    """One batch has a scaled gradient that is not finite."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * LARGE**2 if batch_idx == OVERFLOWING else loss


def fit_by_hand() -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Train in one process with torch only: autocast, `GradScaler`, AdamW, and clipping of unscaled gradients."""
    torch.manual_seed(3)
    model = Overflowing()
    optimizer = model.configure_optimizers()
    scaler = torch.amp.GradScaler("cpu")
    scales = []
    for index, batch in enumerate(regression_data(NUM_STEPS, 1)):
        with torch.autocast("cpu", torch.float16):
            loss = model.training_step(batch, index)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model.losses, dict(model.state_dict()), scales


def fit_in_fp16(strategy: str) -> tuple[list[float], dict[str, Tensor], list[float]]:
    # Allow fp16 on CPU, where strategies refuse it. Losses are scaled as on CUDA.
    as_on_cuda = pytest.MonkeyPatch()
    as_on_cuda.setattr("lightning_paral.engines.zero.options.ZeROOptions.check_precision", lambda *_: None)
    torch.manual_seed(3)
    model = Overflowing()
    scales: list[Any] = []
    model.on_train_batch_end = lambda *_: scales.append(model.trainer.precision_plugin.state_dict()["scale"])  # type: ignore[assignment]
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=strategy, precision="16-mixed", gradient_clip_val=0.1)
    trainer.fit(model, regression_data(NUM_STEPS, 2))
    as_on_cuda.undo()
    return model.losses, {name: weight.clone() for name, weight in model.state_dict().items()}, scales


@pytest.mark.parametrize("strategy", ["paral_zero1", "paral_zero2", "paral_zero3", "paral_zero2_offload"])
def test_fp16_autocast_equals_torchs_with_its_scaler(on_ranks, strategy: str) -> None:
    losses, weights, scales = fit_by_hand()
    assert scales[OVERFLOWING] == scales[OVERFLOWING - 1] / 2

    ranks = on_ranks(2, fit_in_fp16, strategy)

    assert [seen for _, _, seen in ranks] == [scales, scales]
    # Half precision of activations: sums over half a batch round differently.
    assert_same_fit([(mine, kept) for mine, kept, _ in ranks], (losses, weights), tolerance=5e-3)


def test_scale_grows_after_2000_finite_steps() -> None:
    scale = DynamicLossScale()
    for _ in range(2000):
        assert scale.state["scale"] == 2.0**16
        scale.update(is_finite=True)
    assert scale.state["scale"] == 2.0**17
    resumed = DynamicLossScale()
    resumed.state.update(scale.state)
    resumed.update(is_finite=False)
    assert resumed.state["scale"] == 2.0**16
    ZeROOptions().check_precision("16-mixed", torch.device("cuda", 0))
