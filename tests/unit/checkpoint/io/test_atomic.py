"""Drafts of checkpoints are committed atomically, and removed only after their process has ended."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_paral.checkpoint.io.atomic import AtomicPath, _new_save_id, _sibling, remove, remove_leftovers, resolve

ROOT = Path(__file__).parents[4]


def write(target: Path, content: str, *, folder: bool = True) -> None:
    """Save a folder or a file that passes for a checkpoint."""
    draft = AtomicPath(target, folder=folder)
    if folder:
        (draft.path / "__0_0.distcp").write_text(content)
    else:
        torch.save({"state_dict": content}, draft.path)
    draft.commit()


def content_of(target: Path) -> str:
    return (target / "__0_0.distcp").read_text() if target.is_dir() else torch.load(target)["state_dict"]


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("before", [None, "file", "folder", "link"])
def test_draft_takes_the_place_of_anything(tmp_path: Path, folder: bool, before: str | None) -> None:
    target = tmp_path / "x.ckpt"
    if before == "link":
        target.symlink_to("elsewhere")
    elif before is not None:
        write(target, "old", folder=before == "folder")
    write(target, "new", folder=folder)
    assert target.is_dir() == folder
    assert content_of(target) == "new"
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_lightning_does_not_take_a_draft_for_a_checkpoint(tmp_path: Path) -> None:
    for name in ("last.ckpt", "hpc_ckpt_2.ckpt"):
        write(tmp_path / name, "complete")
    drafts = [AtomicPath(tmp_path / name, folder=True) for name in ("last.ckpt", "hpc_ckpt_3.ckpt")]
    connector = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")._checkpoint_connector
    assert connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_2.ckpt")
    assert connector.hpc_save_path(tmp_path) == str(tmp_path / "hpc_ckpt_3.ckpt")
    assert not [name for name in os.listdir(tmp_path) if "last" in name and name != "last.ckpt"]
    for draft in drafts:
        draft.discard()


def test_nothing_is_closed_twice(tmp_path: Path) -> None:
    draft = AtomicPath(tmp_path / "x.ckpt", folder=True)
    draft.commit()
    with open(tmp_path / "y", "w") as another:  # gets the file descriptor of the closed lock
        draft.discard()
        another.write("open")


HOLDING = """
import sys
from pathlib import Path
from lightning_paral.checkpoint.io.atomic import AtomicPath
draft = AtomicPath(Path(sys.argv[1]), folder=True)
(draft.path / "content").write_text("half")
print("holding", flush=True)
sys.stdin.read()
"""


def test_draft_is_a_leftover_as_soon_as_its_process_is_dead(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path / "x.ckpt")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holding\n"
        remove_leftovers(tmp_path)
        assert len(os.listdir(tmp_path)) == 2
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=30)
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == []


def test_lock_removed_before_it_was_held_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock_late(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        remove_leftovers(tmp_path)
        assert os.listdir(tmp_path) == []
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    draft = AtomicPath(tmp_path / "x.ckpt", folder=True)
    remove_leftovers(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    draft.commit()
    assert os.listdir(tmp_path) == ["x.ckpt"]


def age(path: Path) -> None:
    yesterday = time.time() - 25 * 3600
    os.utime(path, (yesterday, yesterday))


def save_many(folder: str) -> int:
    """Save repeatedly, under one name and under several."""
    rank = dist.get_rank()
    for number in range(150):
        name = f"x-{rank}.ckpt" if number % 3 else f"y-{number}-{rank}.ckpt"
        write(Path(folder) / name, str(number), folder=number % 2 == 0)
    return len(list(Path(folder).glob("[xy]*")))


def test_processes_that_save_in_one_folder_keep_each_others_drafts(on_ranks, tmp_path: Path) -> None:
    on_ranks(3, save_many, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"x-{rank}.ckpt" for rank in range(3)] + [f"y-{n}-{rank}.ckpt" for n in range(0, 150, 3) for rank in range(3)]
    )


def flock_of_nfs(descriptor: int, operation: int) -> None:
    """Lock like Linux on NFS, where an exclusive lock needs a descriptor that is open for writing."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    flock(descriptor, operation)


flock = fcntl.flock


def test_locks_work_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    _sibling(tmp_path / "x.ckpt", "saving", _new_save_id(tmp_path / "x.ckpt")).mkdir()
    write(tmp_path / "x.ckpt", "new")
    assert os.listdir(tmp_path) == ["x.ckpt"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_leftovers_without_locks_are_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_flock)
    dead = AtomicPath(tmp_path / "x.ckpt", folder=True)
    write(tmp_path / "x.ckpt", "new")
    assert dead.path.exists()
    age(next(tmp_path.glob(".*lock*")))
    write(tmp_path / "x.ckpt", "newer")
    assert os.listdir(tmp_path) == ["x.ckpt"]


# Files that only look like drafts

NAMES = (
    ".my.saving-202411211530",
    ".my.saving-2024112115300000",
    ".tpkc.x.replaced-0123456789abcdef",
    ".tpkc.x.lock-20241121153012ab",
    ".notes.lock-202411211530",
)


def test_files_with_similar_names_stay(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("ten years")
    (tmp_path / ".a.lock-0123456789abcdef").write_text("a user's")
    write(tmp_path / "x.ckpt", "new")
    write(tmp_path / "x.ckpt", "newer")
    remove_leftovers(tmp_path)
    remove(tmp_path / "x.ckpt")
    assert [(tmp_path / name / "thesis.tex").read_text() for name in NAMES] == ["ten years"] * len(NAMES)
    assert (tmp_path / ".a.lock-0123456789abcdef").read_text() == "a user's"
    assert resolve(tmp_path / "x.ckpt") == tmp_path / "x.ckpt"


def test_a_copy_of_a_draft_under_another_name_stays(tmp_path: Path) -> None:
    draft = AtomicPath(tmp_path / "x.ckpt", folder=True)
    copy = draft.path.with_name(draft.path.name.replace("tpkc.x", "tpkc.y"))
    copy.mkdir()
    draft.discard()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [copy]
