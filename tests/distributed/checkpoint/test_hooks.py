"""Modules whose hooks of torch rename entries when they save and load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_paral import CheckpointError
from tests.contract.cases import PER_PLACEMENT, labels, strategy_of, with_ranks
from tests.models.resumable import Resumable, fit, mean_losses


def rename_old(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename `input` of an old version to `first`, and halve its weights."""
    for kind in ("weight", "bias"):
        if f"{prefix}input.{kind}" in state_dict:
            state_dict[f"{prefix}first.{kind}"] = state_dict.pop(f"{prefix}input.{kind}") / 2


class Renamed(Resumable):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(rename_old)


class Old(Resumable):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        for kind in ("weight", "bias"):
            weights[f"input.{kind}"] = weights.pop(f"first.{kind}") * 2


def strip(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for kind in ("weight", "bias"):
        state_dict[f"{prefix}stripped.{kind}"] = state_dict.pop(f"{prefix}second.{kind}")


def unstrip(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for kind in ("weight", "bias"):
        if f"{prefix}stripped.{kind}" in state_dict:
            state_dict[f"{prefix}second.{kind}"] = state_dict.pop(f"{prefix}stripped.{kind}")


class Stripped(Resumable):
    """Saves parameters under other names, and renames them back when it loads."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(strip)
        self.register_load_state_dict_pre_hook(unstrip)


def save_and_resume(path: str, label: str, saving: Any, loading: Any) -> list[dict[int, float]]:
    losses = []
    for kind, keep in ((saving, "save_to"), (loading, "resume_from")):
        torch.manual_seed(3)
        losses.append(fit(strategy_of(label), 2, module=kind(), **{keep: path}).losses)  # type: ignore[arg-type]
    return losses


@pytest.mark.parametrize("label", labels(with_ranks(PER_PLACEMENT, 2)))
@pytest.mark.parametrize(("saving", "loading"), [(Old, Renamed), (Stripped, Stripped)])
def test_hooks_rename_as_they_do_in_torch(on_ranks, tmp_path: Path, label: str, saving: Any, loading: Any) -> None:
    ranks = on_ranks(2, save_and_resume, str(tmp_path / "x.ckpt"), label, saving, loading)
    expected, found = (mean_losses([rank[run] for rank in ranks]) for run in (0, 1))
    assert found
    for number, loss in found.items():
        assert loss == pytest.approx(expected[number], rel=1e-5)


def test_names_that_no_hook_renames_are_listed(tmp_path: Path) -> None:
    fit("paral_ddp", 1, module=Old(), save_to=tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"Missing in the checkpoint: first\.bias, first\.weight"):
        fit("paral_ddp", 1, module=Stripped(), resume_from=tmp_path / "x.ckpt")
