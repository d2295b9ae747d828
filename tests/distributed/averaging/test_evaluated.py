"""Evaluating a checkpoint after a fit that averaged weights uses the averages in it."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Evaluated(Regression):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", nn.functional.mse_loss(self(batch[0]), batch[1]))


def loss_of_first_epoch(strategy: str, folder: Path) -> float:
    torch.manual_seed(0)
    saving = ModelCheckpoint(folder / strategy, save_top_k=-1, filename="{epoch}")
    callbacks = [EMAWeightAveraging(decay=0.5), saving]
    trainer = quiet_trainer(strategy=strategy, devices=1, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Evaluated(), regression_data(3, 1), regression_data(2, 1))
    path = folder / strategy / "epoch=0.ckpt"
    (found,) = trainer.validate(ckpt_path=path, dataloaders=regression_data(2, 1), verbose=False)
    return found["loss"]


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero2"])
def test_evaluating_a_checkpoint_uses_its_averages(tmp_path: Path, strategy: str) -> None:
    expected = loss_of_first_epoch("auto", tmp_path)
    assert loss_of_first_epoch(strategy, tmp_path) == pytest.approx(expected, rel=1e-5)
