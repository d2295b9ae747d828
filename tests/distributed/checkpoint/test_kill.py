"""Checkpoints are complete even if ranks are killed, disks fill up, or folders are read-only."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_paral import CheckpointError, ParalDDPStrategy
from lightning_paral.checkpoint.integrity import verify
from lightning_paral.checkpoint.io.atomic import _new_save_id, _sibling
from tests.models.resumable import fit

ROOT = Path(__file__).parents[3]
NUM_KILLS = 10


@pytest.mark.parametrize(
    ("strategy", "form", "mode"),
    [
        ("paral_ddp", "full", "sync"),
        ("paral_ddp", "sharded", "async"),
        ("paral_fsdp", "sharded", "sync"),
        ("paral_ddp", "full", "async"),
        ("paral_zero3", "full", "async"),
        ("paral_zero2_offload", "sharded", "sync"),
    ],
)
def test_ranks_killed_while_saving_leave_complete_checkpoints(
    tmp_path: Path, strategy: str, form: str, mode: str
) -> None:
    command = [sys.executable, "-m", "tests.distributed.checkpoint.killed", str(tmp_path / "run"), strategy, form, mode]
    killed = subprocess.run(
        [*command, str(NUM_KILLS), "7"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert killed.returncode == 0, killed.stdout[-3000:] + killed.stderr[-3000:]
    told = json.loads(killed.stdout.splitlines()[-1])
    assert told["kills"] == NUM_KILLS
    assert told["steps"] >= NUM_KILLS // 2, "runs did not resume from one another"
    assert told["left"] <= 2, "leftovers were not cleaned"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no rights to mount: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


class Grown(torch.nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.ones(numel))


def save_on_full_disk(path: str, form: str) -> str:
    """Save a checkpoint that fits on the disk, then a larger one, and return its error."""
    from tests.models.resumable import Resumable, SaveOnce

    class Growing(SaveOnce):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # type: ignore[no-untyped-def]
            if batch_idx == 1:
                trainer.save_checkpoint(self.path)
            if batch_idx == 3:
                pl_module.first.grown = Grown(600_000)
                with pytest.raises(CheckpointError) as raised:
                    trainer.save_checkpoint(self.path)
                self.message = str(raised.value)

    callback = Growing(path)
    fit(ParalDDPStrategy(checkpoint=form), 2, callbacks=[callback], module=Resumable())  # type: ignore[arg-type]
    return callback.message


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_full_disk_raises_on_all_ranks_and_keeps_the_old_checkpoint(on_ranks, small_disk: Path, form: str) -> None:
    path = small_disk / "x.ckpt"
    for message in on_ranks(2, save_on_full_disk, str(path), form):
        assert "No space left on device" in message
        assert f"Saving {path} failed on rank 0 of 2" in message
    assert verify(path) == []
    assert list(small_disk.iterdir()) == [path]
    fit("paral_ddp", 1, resume_from=path)


def save_and_fail(path: str) -> str:
    with pytest.raises(CheckpointError) as raised:
        fit("paral_ddp", 2, save_to=path)
    return str(raised.value)


def test_disk_without_room_for_a_draft_is_named(on_ranks, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(2**20 - 2 * 4096))  # leaves room for the lock of the draft
    for message in on_ranks(2, save_on_disk_without_room, str(small_disk / "x.ckpt")):
        assert "No space left on device" in message


def save_on_disk_without_room(path: str) -> str:
    with pytest.raises(CheckpointError) as raised:
        fit("paral_ddp", 2, save_to=path)
    return str(raised.value)


def test_read_only_folder_raises_on_all_ranks(on_ranks, small_disk: Path) -> None:
    on_ranks(2, save_in, str(small_disk / "x.ckpt"))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for message in on_ranks(2, save_and_fail, str(small_disk / "x.ckpt")):
        assert "Read-only file system" in message
    assert verify(small_disk / "x.ckpt") == []


def save_in(path: str) -> None:
    fit("paral_ddp", 2, save_to=path)


def test_next_save_removes_leftovers_of_a_killed_save(tmp_path: Path) -> None:
    target = tmp_path / "old.ckpt"
    dead = _sibling(target, "saving", _new_save_id(target))
    dead.mkdir()
    (dead / "__0_0.distcp").write_bytes(b"half")
    fit("paral_ddp", 1, save_to=tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == ["x.ckpt"]
