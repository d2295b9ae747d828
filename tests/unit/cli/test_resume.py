"""`paral fit --resume`: a folder, a checkpoint, or the folder of ModelCheckpoint."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_paral import AutoResume
from lightning_paral.cli.resume import checkpoint_or_callback
from lightning_paral.errors import ConfigurationError, MissingCheckpointError
from tests.unit.cli.test_commands import Witness, run


def fit(monkeypatch: pytest.MonkeyPatch, folder: Path, resume: str, num_steps: int, dirpath: Path | None) -> Any:
    saving = {"dirpath": dirpath and str(dirpath), "every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}
    callbacks = [
        {"class_path": "tests.unit.cli.test_commands.Witness"},
        {"class_path": "ModelCheckpoint", "init_args": saving},
    ]
    options = {"callbacks": callbacks, "enable_checkpointing": True, "max_steps": num_steps}
    return run(monkeypatch, folder, "fit", "--resume", resume, **options)


@pytest.mark.parametrize("resume", ["auto", "folder"])
def test_same_command_starts_and_continues(monkeypatch, tmp_path, caplog, resume: str) -> None:
    saved = tmp_path / "checkpoints"
    argument = "auto" if resume == "auto" else str(saved)

    caplog.set_level("INFO")
    fit(monkeypatch, tmp_path, argument, 2, saved)
    assert f"there is no checkpoint in {saved}, so the run starts from the beginning" in caplog.text
    trainer = fit(monkeypatch, tmp_path, argument, 3, saved)

    assert f"resuming from {saved}/step=2.ckpt: step 2" in caplog.text
    assert trainer.global_step == 3


def test_checkpoint_is_named(monkeypatch, tmp_path) -> None:
    saved = tmp_path / "checkpoints"
    fit(monkeypatch, tmp_path, "auto", 2, saved)

    fit(monkeypatch, tmp_path, str(saved / "step=1.ckpt"), 2, saved)

    assert Witness.trainer.ckpt_path == str(saved / "step=1.ckpt")


def test_auto_needs_the_folder_of_a_model_checkpoint(monkeypatch, tmp_path) -> None:
    with pytest.raises(SystemExit, match="the folder from the callbacks of the Trainer, which name no folder"):
        fit(monkeypatch, tmp_path, "auto", 2, None)


def test_missing_checkpoint_is_an_error_and_a_missing_folder_is_not(tmp_path) -> None:
    with pytest.raises(MissingCheckpointError, match="there is no checkpoint"):
        checkpoint_or_callback(str(tmp_path / "step=1.ckpt"), [])
    assert isinstance(checkpoint_or_callback(str(tmp_path / "later"), []), AutoResume)
    assert checkpoint_or_callback("memory://bucket/x.ckpt", []) == "memory://bucket/x.ckpt"
    with pytest.raises(ConfigurationError, match=r"name these folders: .*/a, .*/b"):
        checkpoint_or_callback("auto", [ModelCheckpoint(tmp_path / "a"), ModelCheckpoint(tmp_path / "b")])


def test_other_commands_do_not_resume(monkeypatch, tmp_path) -> None:
    with pytest.raises(SystemExit, match=r"continues a fit, but the command is test\. Use --ckpt_path\."):
        run(monkeypatch, tmp_path, "test", "--resume", "auto")
