"""All ranks agree on the best checkpoint, even if each of them has its own value of what is monitored."""

import os

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.models.linear import Linear, ones
from tests.running import quiet_trainer

VALUES = ([3.0, 1.0, 2.0], [1.5, 2.5, 0.5])
"""The value of each rank in each epoch."""


class Logging(Linear):
    """Logs a value in validation that differs between the ranks, without `sync_dist`."""

    def __init__(self, rank_zero_only: bool) -> None:
        super().__init__()
        self.rank_zero_only = rank_zero_only

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        value = torch.tensor(VALUES[self.global_rank][self.current_epoch])
        self.log("val_loss", value, rank_zero_only=self.rank_zero_only)


def fit(strategy: str, folder: str, rank_zero_only: bool) -> tuple[str, float, list[str], bool]:
    best = ModelCheckpoint(folder, filename="{epoch}-{val_loss:.2f}", monitor="val_loss", save_top_k=1)
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=3, num_sanity_val_steps=0, enable_checkpointing=True, callbacks=best
    )
    trainer.fit(Logging(rank_zero_only), ones(), ones())
    assert best.best_model_score is not None
    is_restored = "_monitor_candidates" not in vars(best)
    return best.best_model_path, float(best.best_model_score), list(best.best_k_models), is_restored


@pytest.mark.parametrize("rank_zero_only", [False, True])
@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero2"])
def test_all_ranks_choose_the_best_checkpoint_of_rank_0(
    on_ranks, tmp_path, strategy: str, rank_zero_only: bool
) -> None:
    first, second = on_ranks(2, fit, strategy, str(tmp_path), rank_zero_only)

    assert first == second
    path, score, _, is_restored = first
    assert (os.path.basename(path), score) == ("epoch=1-val_loss=1.00.ckpt", 1.0)
    assert os.path.exists(path)
    assert is_restored
