"""Saves and loads log their path, size and duration for operators."""

import logging
from pathlib import Path

import pytest
import torch

from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.options import Form


def save(path: Path, form: Form) -> int:
    """Save to `path`, and return the size of the checkpoint."""
    SaveJob.prepare({"state_dict": {"a": torch.ones(300)}}, path, form, RankGroup(), set(), "Test").write(RankGroup())
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.name != "manifest.json")


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_saves_and_loads_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, form: Form) -> None:
    path = tmp_path / "x.ckpt"
    with caplog.at_level(logging.INFO, logger="lightning_paral"):
        nbytes = save(path, form)
        load(path, RankGroup())

    committed, opened = caplog.messages
    assert committed.startswith(f"checkpoint committed: {path}, {nbytes} bytes, ")
    assert opened.startswith(f"checkpoint verified and opened: {path}, ")
    assert all(message.endswith(" s") for message in caplog.messages)
