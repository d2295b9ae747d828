"""Checkpoints are replaced safely on file systems that cannot exchange two folders atomically, such as NFS."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from lightning_paral import CheckpointError
from lightning_paral.checkpoint import commit
from lightning_paral.checkpoint.load import load, verify
from lightning_paral.checkpoint.storage import remove_at
from lightning_paral.distributed.exchange import RankGroup, all_ranks
from tests.launching import Process, outputs
from tests.models.resumable import SAVED_AFTER, losses, refusal

REPLACING = """
import os, shutil, sys
from pathlib import Path
from lightning_paral.checkpoint import commit

def rename_and_wait(source, to):
    rename(source, to)
    if source == target:
        print("between", flush=True)
        sys.stdin.read()

commit.exchange = lambda first, second: False
rename, os.rename = os.rename, rename_and_wait
target = Path(sys.argv[1])
draft = commit.AtomicPath(target, folder=True)
shutil.copytree(sys.argv[2], draft.path, dirs_exist_ok=True)
draft.commit()
print("saved", flush=True)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "x.ckpt"
    losses("paral_ddp", checkpoint="sharded", save_to=path)
    return path


@pytest.fixture
def target(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "run" / "x.ckpt")


@pytest.fixture
def other(launch, saved: Path, target: Path) -> Process:
    """A process that has moved the target away and not yet moved the new checkpoint there."""
    process = launch("-c", REPLACING, str(target), str(saved))
    assert "between\n" in process.stdout
    assert not target.exists()
    return process


def save_another(target: Path) -> None:
    losses("paral_ddp", checkpoint="sharded", save_to=target.with_name("y.ckpt"))


def step_seen(path: str) -> int:
    return int(load(path, all_ranks())["global_step"])


def test_checkpoint_moved_by_a_dead_process_is_found_and_restored(on_ranks, target: Path, other) -> None:
    other.kill()
    other.wait(timeout=30)
    found = sorted(os.listdir(target.parent))
    assert verify(target) == []
    assert on_ranks(2, step_seen, str(target)) == [SAVED_AFTER // 2] * 2
    losses("paral_ddp", resume_from=target)
    assert sorted(os.listdir(target.parent)) == found, "reading changed what was read"

    save_another(target)
    assert sorted(os.listdir(target.parent)) == ["x.ckpt", "y.ckpt"]
    assert verify(target) == []


@pytest.mark.parametrize("interrupted", [False, True])
def test_removed_checkpoint_is_not_restored(target: Path, other, monkeypatch, interrupted: bool) -> None:
    other.kill()
    other.wait(timeout=30)
    with monkeypatch.context() as patched:
        if interrupted:
            patched.setattr(commit, "delete", lambda path: None)
        remove_at(str(target))
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        load(target, RankGroup())
    save_another(target)
    assert os.listdir(target.parent) == ["y.ckpt"]


def test_checkpoint_moved_by_a_running_process_is_left_alone(target: Path, other) -> None:
    save_another(target)
    assert not target.exists()
    assert verify(target) == []
    (said,) = outputs(other)
    assert "saved\n" in said
    assert sorted(os.listdir(target.parent)) == ["x.ckpt", "y.ckpt"]
    assert verify(target) == []


def test_old_checkpoint_stays_if_the_new_one_cannot_replace_it(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def rename_not(source: Path, to: Path) -> None:
        if to == target and ".saving-" in source.name:
            raise OSError("the disk")
        rename(source, to)

    monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    monkeypatch.setattr(os, "rename", rename_not)
    before = target.stat().st_ino
    assert "the disk" in refusal("paral_ddp", checkpoint="sharded", save_to=target)
    assert target.stat().st_ino == before
    assert os.listdir(target.parent) == ["x.ckpt"]


@pytest.mark.parametrize("atomic", [True, False])
def test_loading_while_another_thread_saves(target: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool) -> None:
    if not atomic:
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    copy = shutil.copytree(target, target.with_name("copy"))
    done = threading.Event()

    def save() -> None:
        while not done.wait(0.2):
            draft = commit.AtomicPath(target, folder=True)
            shutil.copytree(copy, draft.path, dirs_exist_ok=True)
            draft.commit()

    thread = threading.Thread(target=save)
    thread.start()
    try:
        for _ in range(50):
            assert load(target, RankGroup())["global_step"] == SAVED_AFTER // 2
            assert verify(target) == []
    finally:
        done.set()
        thread.join(timeout=30)


def test_loaded_tensors_do_not_change_when_the_file_is_replaced(target: Path) -> None:
    loaded = load(target, RankGroup())
    expected = {name: value.clone() for name, value in load(target, RankGroup())["state_dict"].items()}
    losses("paral_ddp", checkpoint="sharded", save_to=target, accumulate_grad_batches=1)
    weight = "first.weight"
    assert not torch.equal(load(target, RankGroup())["state_dict"][weight].clone(), expected[weight])
    assert all(torch.equal(value.clone(), expected[name]) for name, value in loaded["state_dict"].items())
