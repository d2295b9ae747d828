"""Checkpoints are complete even if ranks are killed, disks fill up, or folders are read-only."""

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_paral import CheckpointError
from lightning_paral.checkpoint.load import verify
from tests.launching import outputs
from tests.models.resumable import SaveOnce, losses, refusal

NUM_KILLS = 10


@pytest.mark.lane("all")
@pytest.mark.parametrize(
    ("strategy", "form", "mode"),
    [
        ("paral_ddp", "full", "sync"),
        ("paral_ddp", "sharded", "async"),
        pytest.param("paral_fsdp", "sharded", "sync", marks=pytest.mark.lane("full")),
        ("paral_ddp", "full", "async"),
        ("paral_zero3", "full", "async"),
        ("paral_zero2_offload", "sharded", "sync"),
    ],
)
def test_ranks_killed_while_saving_leave_complete_checkpoints(
    launch, tmp_path: Path, strategy: str, form: str, mode: str
) -> None:
    arguments = [str(tmp_path / "run"), strategy, form, mode, str(NUM_KILLS), "7"]
    killed = launch("-m", "tests.distributed.checkpoint.killed", *arguments)

    (printed,) = outputs(killed)

    assert killed.returncode == 0, printed[-3000:]
    (told,) = (json.loads(line) for line in printed.splitlines() if line.startswith('{"steps'))
    assert told["steps"] >= NUM_KILLS // 2, "runs did not resume from one another"
    assert told["left"] <= 2, "leftovers were not cleaned"


@pytest.mark.parametrize(
    ("strategy", "killed", "said", "saved"),
    [
        ("paral_ddp", 1, "Rank 0 ended because rank 1 died", ["failed-step=3.ckpt"]),
        ("paral_ddp", 0, "was not saved after the failure: rank 0, which saves, has died", []),
        ("paral_fsdp", 1, "was not saved after the failure: each rank holds a shard of the state", []),
        ("paral_fsdp", 0, "was not saved after the failure: each rank holds a shard of the state", []),
    ],
)
def test_rank_0_saves_after_the_death_of_a_rank_if_it_lives_and_has_everything(
    launch, tmp_path: Path, strategy: str, killed: int, said: str, saved: list[str]
) -> None:
    folder = tmp_path / "saved"
    (printed,) = outputs(launch("-m", "tests.distributed.checkpoint.survived", str(folder), strategy, str(killed)))
    assert said in printed, printed[-3000:]
    assert [path.name for path in folder.glob("*")] == saved
    for path in folder.glob("*"):
        assert verify(path) == []
        assert losses("one process", resume_from=path), "it did not resume"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no rights to mount: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


class Grown(torch.nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.ones(numel))


class SaveThenGrow(SaveOnce):
    """Saves a checkpoint that fits on the disk, then a larger one, and keeps its error."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)
        if batch_idx == 3:
            pl_module.first.grown = Grown(600_000)
            with pytest.raises(CheckpointError) as raised:
                trainer.save_checkpoint(self.path)
            self.message = str(raised.value)


def save_on_full_disk(path: Path, form: str) -> str:
    callback = SaveThenGrow(str(path))
    losses("paral_ddp", checkpoint=form, callbacks=[callback])
    return callback.message


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_full_disk_raises_on_all_ranks_and_keeps_the_old_checkpoint(on_ranks, small_disk: Path, form: str) -> None:
    path = small_disk / "x.ckpt"
    for message in on_ranks(2, save_on_full_disk, path, form):
        assert "No space left on device" in message
        assert f"Saving {path} failed on rank 0 of 2" in message
    assert verify(path) == []
    assert list(small_disk.iterdir()) == [path]
    losses("paral_ddp", resume_from=path)


def test_read_only_folder_raises_on_all_ranks(on_ranks, small_disk: Path) -> None:
    path = small_disk / "x.ckpt"
    on_ranks(2, partial(losses, "paral_ddp", save_to=path))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for message in on_ranks(2, partial(refusal, "paral_ddp", save_to=path)):
        assert "Read-only file system" in message
    assert verify(path) == []
