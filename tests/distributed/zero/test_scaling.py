"""fp16 autocast under ZeRO adapts the loss scale, and clips unscaled gradients."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_paral import ParalZeROStrategy
from lightning_paral.engines.zero.optimizer import DynamicLossScale
from lightning_paral.engines.zero.options import ZeROOptions
from tests.models.regression import Regression, regression_data
from tests.running import SaveAt, assert_same_fit, quiet_trainer

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


def scales_of_two_fits() -> list[float]:
    """Return the scale at the beginning and end of a fit, and of the next one with the same Trainer."""
    with pytest.MonkeyPatch.context() as as_on_cuda:
        as_on_cuda.setattr("lightning_paral.engines.zero.options.ZeROOptions.check_precision", lambda *_: None)
        trainer = quiet_trainer(max_steps=OVERFLOWING + 1, devices=1, strategy="paral_zero2", precision="16-mixed")
        scales: list[Any] = []
        for _ in range(2):
            model = Overflowing()
            model.on_train_start = model.on_train_end = lambda: scales.append(  # type: ignore[method-assign]
                trainer.precision_plugin.state_dict()["scale"]
            )
            trainer.fit(model, regression_data(NUM_STEPS, 1))
            trainer.fit_loop.epoch_loop.max_steps += 1
        return scales


def test_scale_goes_on_in_a_second_fit() -> None:
    at_first, then, at_second, _ = scales_of_two_fits()

    assert at_second == then < at_first


class Summing(LightningModule):
    """Each step lowers the weight by 0.1, in fp16 weights; the gradient of batch 1 is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.seen: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight.float().sum() * (LARGE if batch_idx == 1 else 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        scale = self.trainer.precision_plugin.state_dict()["scale"]
        self.seen.append((round(float(strategy.full_parameter(self.weight)[0]), 4), scale))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_fp16_weights(stage: int, folder: str) -> tuple[list[Any], list[Any]]:
    """Return weight and scale after each batch of a whole fit, and of one that resumes after batch 4."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    def fit(path: str | None) -> list[Any]:
        fp16 = {"fp16": {"loss_scale_window": 3, "initial_scale_power": 8}}
        strategy = ParalZeROStrategy(stage=stage, deepspeed_config=fp16)
        save = SaveAt(4, f"{folder}/x.ckpt")
        model, loader = Summing(), DataLoader(range(8))  # type: ignore[arg-type]
        trainer = quiet_trainer(max_epochs=1, devices=1, strategy=strategy, precision="16-true", callbacks=[save])
        trainer.fit(model, loader, ckpt_path=path)
        return model.seen

    with pytest.MonkeyPatch.context() as as_on_cuda:
        as_on_cuda.setattr("lightning_paral.engines.zero.options.ZeROOptions.check_precision", lambda *_: None)
        as_on_cuda.setattr(CPU_Accelerator, "is_fp16_supported", lambda _: True)
        as_on_cuda.setattr(CPU_Accelerator, "supported_dtypes", lambda _: [torch.float, torch.bfloat16, torch.half])
        return fit(None), fit(f"{folder}/x.ckpt")


@pytest.mark.parametrize("stage", [2, 3])
def test_loss_scale_of_fp16_weights_changes_no_gradient_and_resumes(on_ranks, stage: int, tmp_path) -> None:
    [(whole, resumed)] = on_ranks(1, fit_fp16_weights, stage, str(tmp_path))

    steps = [0, 0, 1, 2, 3, 4, 5, 6]  # the second batch is skipped
    scales = [256.0, 128.0, 128.0, 128.0, 256.0, 256.0, 256.0, 512.0]
    assert whole == [
        (pytest.approx(-0.1 * (1 + step), abs=1e-3), scale) for step, scale in zip(steps, scales, strict=True)
    ]
    assert resumed == whole[4:]


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
