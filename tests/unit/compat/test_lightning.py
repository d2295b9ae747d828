"""What is replaced in Lightning exists, and its warning filters stay."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision

from lightning_paral import ParalZeROStrategy
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.lightning.strategies import replace_strategy
from lightning_paral.compat.private_name import replace as set_private
from lightning_paral.errors import ConfigurationError, PrivateNameError
from tests.running import quiet_trainer


@pytest.mark.parametrize(
    "replace",
    [
        lambda: shadow_method(BoringModel(), "_gone", print),
        lambda: set_private(BoringModel(), "_gone", None),
    ],
    ids=["method of an instance", "attribute"],
)
def test_replacing_a_missing_attribute_raises(replace: Callable[[], Any]) -> None:
    with pytest.raises(PrivateNameError, match=r"_gone.*[Ii]nstall"):
        replace()


def test_resuming_inside_an_epoch_does_not_warn_or_change_warning_filters(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 3, "limit_val_batches": 0, "devices": 1}
    first = quiet_trainer(strategy="paral_ddp", callbacks=[checkpoints], enable_checkpointing=True, **options)
    first.fit(BoringModel())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        resumed = quiet_trainer(strategy="paral_ddp", **options)
        resumed.fit(BoringModel(), ckpt_path=tmp_path / "step=2.ckpt")
        assert warnings.filters == before
    assert resumed.global_step == 3
    assert not [each for each in warned if "resuming from a checkpoint" in str(each.message)]


def test_strategy_that_is_chosen_late_refuses_a_loss_scale_that_it_would_drop() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer = quiet_trainer(strategy="paral_ddp", devices=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])

    with pytest.raises(ConfigurationError, match="MixedPrecision cannot be used under ZeRO"):
        replace_strategy(trainer, ParalZeROStrategy())
