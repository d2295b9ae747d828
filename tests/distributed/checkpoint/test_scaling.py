"""The loss scale of fp16 autocast resumes under every strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from torch import Tensor

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy
from tests.distributed.zero.test_scaling import LARGE
from tests.models.regression import Regression, regression_data
from tests.models.resumable import SAVED_AFTER, SaveOnce
from tests.running import quiet_trainer

OVERFLOWING = 1
GROWTH_INTERVAL = 1500


class Overflowing(Regression):
    scale: dict[str, Any]
    """The loss scale at the start of the run, or when the run saves."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * LARGE**2 if batch_idx == OVERFLOWING else loss

    def on_train_start(self) -> None:
        plugin = self.trainer.precision_plugin
        self.scale = dict(plugin.state_dict())
        if self.trainer.global_step == 0:  # the run that saves
            plugin.load_state_dict(self.scale | {"growth_interval": GROWTH_INTERVAL})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == SAVED_AFTER - 1:
            self.scale = dict(self.trainer.precision_plugin.state_dict())


def trainer_of(label: str, **options: Any) -> Any:
    """Return a Trainer with fp16 on CPU, by a plugin if the strategy would refuse it. Loss scaling is as on CUDA."""
    if label.startswith("zero"):
        return quiet_trainer(strategy=f"paral_{label}", precision="16-mixed", **options)
    strategies: dict[str, Any] = {
        "ddp": ParalDDPStrategy,
        "fsdp": ParalFSDPStrategy,
        "fsdp_full": lambda: ParalFSDPStrategy(checkpoint="full"),
        "lightning": lambda: LightningDDPStrategy(process_group_backend="gloo"),
    }
    scaler = torch.amp.GradScaler("cpu")
    return quiet_trainer(strategy=strategies[label](), plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **options)


def fit(label: str, path: str, resume: bool = False) -> dict[str, Any]:
    """Return the state of the loss scale when the run was saved or resumed."""
    torch.manual_seed(3)
    model = Overflowing()
    with pytest.MonkeyPatch.context() as as_on_cuda:
        as_on_cuda.setattr("lightning_paral.engines.zero.options.ZeROOptions.check_precision", lambda *_: None)
        as_on_cuda.setattr("lightning_paral.strategies.fsdp.check_precision", lambda *_: None)
        trainer = trainer_of(label, max_epochs=1, devices=2, callbacks=[] if resume else [SaveOnce(path)])
        trainer.fit(model, regression_data(SAVED_AFTER + 1, 2), ckpt_path=path if resume else None)
    return model.scale


def resume_under_all(path: str, labels: list[str]) -> dict[str, dict[str, Any]]:
    return {label: fit(label, path, resume=True) for label in labels}


@pytest.mark.parametrize("source", ["ddp", "fsdp", "zero1", "zero3", "lightning"])
def test_loss_scale_resumes_under_every_strategy(on_ranks, tmp_path: Path, source: str) -> None:
    path = str(tmp_path / "x.ckpt")
    (saved, same) = on_ranks(2, fit, source, path)
    assert saved == same
    assert saved["scale"] < 2.0**16
    assert saved["growth_interval"] == GROWTH_INTERVAL
    assert saved["_growth_tracker"] == SAVED_AFTER - OVERFLOWING - 1
    for found in on_ranks(2, resume_under_all, path, ["ddp", "fsdp", "zero1", "zero2", "zero3"]):
        assert found == dict.fromkeys(found, saved)


@pytest.mark.parametrize("name", ["FSDPPrecision", "unknown"])
def test_entry_of_lightnings_fsdp_resumes_and_without_one_the_scale_starts_anew(
    on_ranks, tmp_path: Path, name: str
) -> None:
    """Lightning's FSDPStrategy needs CUDA, so the test renames the entry as its plugin would."""
    path = tmp_path / "x.ckpt"
    (saved, _) = on_ranks(2, fit, "lightning", str(path))
    checkpoint = torch.load(path)
    checkpoint[name] = checkpoint.pop("MixedPrecision")
    torch.save(checkpoint, path)
    for found in on_ranks(2, resume_under_all, str(path), ["ddp", "fsdp", "zero2"]):
        scales = {state["scale"] for state in found.values()}
        assert scales == {saved["scale"] if name == "FSDPPrecision" else 2.0**16}


def test_lightning_resumes_our_loss_scale(on_ranks, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    (saved, _) = on_ranks(2, fit, "fsdp_full", str(path))
    for found in on_ranks(2, resume_under_all, str(path), ["lightning"]):
        assert found == {"lightning": saved}
