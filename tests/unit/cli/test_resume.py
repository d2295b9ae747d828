"""`paral fit --resume`: a folder, a checkpoint, or the folder of ModelCheckpoint."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.test_commands import WITNESS, Witness, run


def fit(monkeypatch: pytest.MonkeyPatch, folder: Path, resume: str, num_steps: int, dirpath: Path | None) -> Any:
    saving = {"dirpath": dirpath and str(dirpath), "every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}
    callbacks = [WITNESS, {"class_path": "ModelCheckpoint", "init_args": saving}]
    options = {"callbacks": callbacks, "enable_checkpointing": True, "max_steps": num_steps}
    return run(monkeypatch, folder, "fit", "--resume", resume, **options)


@pytest.mark.parametrize("resume", ["auto", "folder"])
def test_same_command_starts_and_continues(monkeypatch, tmp_path, caplog, resume: str) -> None:
    saved = tmp_path / "checkpoints"
    argument = "auto" if resume == "auto" else str(saved)

    caplog.set_level("INFO")
    assert fit(monkeypatch, tmp_path, argument, 2, saved).global_step == 2
    trainer = fit(monkeypatch, tmp_path, argument, 3, saved)

    assert f"{saved}/step=2.ckpt" in caplog.text
    assert trainer.global_step == 3


def test_checkpoint_is_named(monkeypatch, tmp_path) -> None:
    saved = tmp_path / "checkpoints"
    fit(monkeypatch, tmp_path, "auto", 2, saved)

    fit(monkeypatch, tmp_path, str(saved / "step=1.ckpt"), 2, saved)

    assert Witness.trainer.ckpt_path == str(saved / "step=1.ckpt")


@pytest.mark.parametrize(("resume", "reason"), [("auto", "ModelCheckpoint, which has none"), ("x.ckpt", "x.ckpt")])
def test_folder_and_checkpoint_must_be_given(monkeypatch, tmp_path, resume: str, reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        fit(monkeypatch, tmp_path, resume, 2, None)


def test_other_commands_do_not_resume(monkeypatch, tmp_path) -> None:
    with pytest.raises(SystemExit, match="is for `paral fit`"):
        run(monkeypatch, tmp_path, "test", "--resume", "auto")
