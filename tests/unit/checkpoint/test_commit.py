"""A save replaces its target in one step; saving, removing and cleaning up keep whatever is not of a checkpoint."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from lightning_paral import CheckpointError, CheckpointOptions, ParalDDPStrategy
from lightning_paral.checkpoint.background import Staging
from lightning_paral.checkpoint.commit import AtomicPath, _new_save_id, _siblings, remove_leftovers, resolve
from lightning_paral.checkpoint.load import peek
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.checkpoint.storage import remove_at
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.options import Form

FORMS: list[Form] = ["full", "sharded"]


def prepared(path: object, form: Form, value: Tensor = torch.ones(3)) -> SaveJob:  # noqa: B008
    checkpoint = {"epoch": 0, "global_step": 1, "state_dict": {"a": value}}
    return SaveJob.prepare(checkpoint, path, form, RankGroup(), strategy="Test")


def save(path: object, form: Form = "sharded") -> None:
    prepared(path, form).write(RankGroup())


def tree(folder: Path) -> dict[str, Any]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def written(files: dict[str, str]) -> Any:
    """Return a function that makes a folder of these files."""

    def make(path: Path) -> None:
        for name, text in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(text)

    return make


def checkpoint_with(*names: str) -> Any:
    def make(path: Path) -> None:
        save(path)
        written(dict.fromkeys(names, "mine"))(path)

    return make


def runs(path: Path) -> None:
    """Make a folder of checkpoints, which is not itself a checkpoint."""
    save(path / "a.ckpt")
    save(path / "b.ckpt", "full")


def checkpoint_with_fifo(path: Path) -> None:
    save(path)
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def link_to_thesis(path: Path) -> None:
    thesis(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


# What is kept

thesis = written({"thesis.tex": "ten years"})
OF_DEEPSPEED = [f"checkpoint/bf16_zero_pp_rank_0_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")]
KEPT = {
    "thesis": thesis,
    "link": link_to_thesis,
    "looks alike": written({"manifest.json": '{"name": "an extension of a browser"}', "meta.pt": "mine"}),
    "of Eclipse": written({".metadata/version.ini": "1"}),
    "named like its folder": written({"results": "mine"}),
    "of DeepSpeed": written(dict.fromkeys(OF_DEEPSPEED, "states") | {"latest": "checkpoint"}),
    "runs": runs,
    "fifo": os.mkfifo,
    "checkpoint with a fifo": checkpoint_with_fifo,
    **{name: checkpoint_with(name) for name in ("README.md", "logs/events", "__0_0.distcp.bak", "results")},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KEPT)
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, form: Form, kind: str) -> None:
    path = tmp_path / "results"
    KEPT[kind](path)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="results would delete what does not belong to a checkpoint"):
        save(path, form)
    with pytest.raises(CheckpointError):  # a background save raises before training continues
        prepared(path, form).stage(Staging())
    assert tree(tmp_path) == before


def test_ordinary_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine: a state_dict")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    for name in ("notes.txt", "tensor.pt"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(CheckpointError, match=f"Saving to .*{name} would delete .*: {name}"):
            save(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
        save(tmp_path / name, "full")  # as torch.save does


def test_folder_that_appears_during_a_save_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    saving = prepared(path, "sharded")
    write = saving._write_folder

    def write_slowly(*args: Any) -> None:
        write(*args)
        thesis(path)

    monkeypatch.setattr(saving, "_write_folder", write_slowly)
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        saving.write(RankGroup())
    assert tree(tmp_path) == {"last.ckpt": None, "last.ckpt/thesis.tex": b"ten years"}


def test_removing_keeps_other_files(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    checkpoint_with("thesis.tex")(path)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"best\.ckpt is kept, because it has files that do not .*: thesis\.tex"):
            remove_at(str(path))
        assert tree(tmp_path) == {"best.ckpt": None, "best.ckpt/thesis.tex": b"mine"}


# What is replaced


def of_dcp(path: Path) -> None:
    dcp.save({"state_dict": {"a": torch.ones(3)}}, checkpoint_id=path, no_dist=True)
    torch.save({}, path / "meta.pt")


def link(path: Path) -> None:
    save(path.with_name("newest.ckpt"))
    path.symlink_to("newest.ckpt")


def incomplete(path: Path) -> None:
    save(path)
    (path / ".metadata").unlink()
    (path / "manifest.json").unlink()


REPLACED = {
    "nothing": lambda path: None,
    "empty": Path.mkdir,
    "of the system": written({".DS_Store": ""}),
    "empty file": Path.touch,
    "full": lambda path: save(path, "full"),
    "sharded": save,
    "opened on a Mac": checkpoint_with(".DS_Store", "._meta.pt"),
    "of DCP": of_dcp,
    "of Lightning": lambda path: torch.save({"hyper_parameters": "x" * 9999, "state_dict": {}}, path),
    "link": link,
    "broken link": lambda path: path.symlink_to("elsewhere"),
    "incomplete": incomplete,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", REPLACED)
def test_checkpoints_are_replaced_and_removed(tmp_path: Path, form: Form, kind: str) -> None:
    replaced, removed = (tmp_path / folder / "last.ckpt" for folder in "ab")
    for path in (replaced, removed):
        path.parent.mkdir()
        REPLACED[kind](path)
    others = set(os.listdir(tmp_path / "a")) - {"last.ckpt"}

    save(replaced, form)
    assert peek(replaced)[1]["global_step"] == 1
    assert replaced.is_dir() == (form == "sharded")
    assert not replaced.is_symlink()
    assert set(os.listdir(tmp_path / "a")) == {"last.ckpt", *others}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remove_at(str(removed))
    assert set(os.listdir(tmp_path / "b")) == others


@pytest.mark.parametrize("form", FORMS)
def test_tensor_without_values_is_refused(tmp_path: Path, form: Form) -> None:
    with pytest.raises(CheckpointError, match="has no values to save"):
        prepared(tmp_path / "x.ckpt", form, torch.ones(2, device="meta"))


# Behind a URL


@pytest.fixture
def memory() -> Any:
    found = fsspec.filesystem("memory")
    if found.exists("/owned"):
        found.rm("/owned", recursive=True)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_beside_checkpoint", [False, True])
def test_other_files_behind_urls_are_kept(memory: Any, form: Form, is_beside_checkpoint: bool) -> None:
    if is_beside_checkpoint:
        save("memory://owned/results")
    memory.pipe({"/owned/results/thesis.tex": b"mine", "/owned/results/more/x": b"mine"})
    with pytest.raises(CheckpointError, match=r"memory://owned/results would delete .*: more, thesis\.tex\."):
        save("memory://owned/results", form)
    with pytest.warns(UserWarning, match=r"memory://owned/results is kept, .*thesis\.tex"):
        remove_at("memory://owned/results")
    assert sorted(memory.find("/owned")) == ["/owned/results/more/x", "/owned/results/thesis.tex"]


def test_checkpoints_behind_urls_are_replaced_and_removed(memory: Any) -> None:
    for form in (*["sharded"] * 2, *["full"] * 2):  # unlike in an object store, a folder cannot replace a file here
        save("memory://owned/x.ckpt", form)  # type: ignore[arg-type]
        assert peek("memory://owned/x.ckpt")[1]["global_step"] == 1
    remove_at("memory://owned/x.ckpt")
    assert memory.find("/owned") == []
    memory.pipe("/owned/notes.txt", b"mine")
    with pytest.raises(CheckpointError, match=r"memory://owned/notes\.txt would delete"):
        save("memory://owned/notes.txt")


# In a run


def fit(folder: Path, strategy: Any) -> list[str]:
    callback = ModelCheckpoint(
        folder, save_top_k=1, monitor="step", mode="max", save_last=True, enable_version_counter=False
    )
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=3, limit_train_batches=1, limit_val_batches=0,
        logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(BoringModel())
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("in_background", [True, False])
def test_model_checkpoint_replaces_its_own(tmp_path: Path, in_background: bool) -> None:
    def strategy() -> ParalDDPStrategy:
        return ParalDDPStrategy(checkpoint=CheckpointOptions("sharded", async_save=in_background))

    for _ in range(2):
        assert fit(tmp_path, strategy()) == ["epoch=2-step=3.ckpt", "last.ckpt"]
    shutil.rmtree(tmp_path / "last.ckpt")
    thesis(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"last\.ckpt would delete .*: thesis\.tex\."):
        fit(tmp_path, strategy())
    assert os.listdir(tmp_path / "last.ckpt") == ["thesis.tex"]


def test_lightning_does_not_take_a_draft_for_a_checkpoint(tmp_path: Path) -> None:
    for name in ("last.ckpt", "hpc_ckpt_2.ckpt"):
        save(tmp_path / name)
    drafts = [AtomicPath(tmp_path / name, folder=True) for name in ("last.ckpt", "hpc_ckpt_3.ckpt")]
    connector = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")._checkpoint_connector
    assert connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_2.ckpt")
    assert connector.hpc_save_path(tmp_path) == str(tmp_path / "hpc_ckpt_3.ckpt")
    assert not [name for name in os.listdir(tmp_path) if "last" in name and name != "last.ckpt"]
    for draft in drafts:
        draft.discard()


# Leftovers of killed saves

HOLDING = """
import sys
from pathlib import Path
from lightning_paral.checkpoint.commit import AtomicPath
draft = AtomicPath(Path(sys.argv[1]), folder=True)
(draft.path / "content").write_text("half")
print("holding", flush=True)
sys.stdin.read()
"""


def test_draft_is_a_leftover_as_soon_as_its_process_is_dead(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path / "x.ckpt")]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holding\n"
        remove_leftovers(tmp_path)
        assert len(os.listdir(tmp_path)) == 2
        other.kill()
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
    draft = AtomicPath(tmp_path / "x.ckpt", folder=False)
    remove_leftovers(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    draft.commit()
    with open(tmp_path / "y", "w") as another:  # gets the file descriptor of the closed lock
        draft.discard()
        another.write("open")
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt", "y"]


def save_many(folder: str) -> None:
    """Save repeatedly, under one name and under several."""
    rank = dist.get_rank()
    for number in range(60):
        name = f"x-{rank}.ckpt" if number % 3 else f"y-{number}-{rank}.ckpt"
        draft = AtomicPath(Path(folder) / name, folder=number % 2 == 0)
        if number % 2 == 0:
            (draft.path / "__0_0.distcp").write_text("content")
        else:
            torch.save({"state_dict": "content"}, draft.path)
        draft.commit()


def test_processes_that_save_in_one_folder_keep_each_others_drafts(on_ranks, tmp_path: Path) -> None:
    on_ranks(3, save_many, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"x-{rank}.ckpt" for rank in range(3)] + [f"y-{n}-{rank}.ckpt" for n in range(0, 60, 3) for rank in range(3)]
    )


flock = fcntl.flock


def flock_of_nfs(descriptor: int, operation: int) -> None:
    """Lock like Linux on NFS, where an exclusive lock needs a descriptor that is open for writing."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    flock(descriptor, operation)


@pytest.mark.parametrize("number", [0, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_leftovers_are_removed_on_nfs_and_without_locks_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    lock, draft, _ = _siblings(tmp_path / "x.ckpt", _new_save_id())
    lock.touch()
    draft.mkdir()
    monkeypatch.setattr(fcntl, "flock", no_flock if number else flock_of_nfs)
    if number:
        save(tmp_path / "x.ckpt")
        assert draft.exists()
        yesterday = time.time() - 25 * 3600
        os.utime(lock, (yesterday, yesterday))
    save(tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == ["x.ckpt"]


SIMILAR_NAMES = (
    ".my.saving-202411211530",
    ".my.saving-2024112115300000",
    ".tpkc.x.replaced-0123456789abcdef",
    ".tpkc.x.lock-20241121153012ab",
)


def test_files_with_similar_names_stay(tmp_path: Path) -> None:
    names = set(SIMILAR_NAMES)
    for name in names:
        (tmp_path / name).mkdir()
    for _ in range(2):
        save(tmp_path / "x.ckpt")
    remove_at(str(tmp_path / "x.ckpt"))
    assert set(os.listdir(tmp_path)) == names
    assert resolve(tmp_path / "x.ckpt") == tmp_path / "x.ckpt"
