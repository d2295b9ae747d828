"""Saving and removing never delete files that are not part of a checkpoint."""

import os
import shutil
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

from lightning_paral import CheckpointError, CheckpointOptions, ParalDDPStrategy
from lightning_paral.checkpoint.host_memory import Staging
from lightning_paral.checkpoint.io.storage import remove_at
from lightning_paral.checkpoint.load import peek
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.options import Form

FORMS: list[Form] = ["full", "sharded"]


def prepared(path: object, form: Form) -> SaveJob:
    checkpoint = {"epoch": 0, "global_step": 1, "state_dict": {"a": torch.ones(3)}}
    return SaveJob.prepare(checkpoint, path, form, RankGroup(), strategy="Test")


def save(path: object, form: Form) -> None:
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
        save(path, "sharded")
        written(dict.fromkeys(names, "mine"))(path)

    return make


def runs(path: Path) -> None:
    """Make a folder of checkpoints, which is not itself a checkpoint."""
    save(path / "a.ckpt", "sharded")
    save(path / "b.ckpt", "full")


thesis = written({"thesis.tex": "ten years"})
KEPT = {
    "thesis": thesis,
    "looks alike": written({"manifest.json": '{"name": "an extension of a browser"}', "meta.pt": "mine"}),
    "several steps of DeepSpeed": written(
        {**{f"global_step{n}/mp_rank_00_model_states.pt": "states" for n in (10, 20)}, "latest": "global_step20"}
    ),
    "lone latest": written({"latest": "news", "news/x": ""}),
    "runs": runs,
    "fifo": os.mkfifo,
    **{name: checkpoint_with(name) for name in ("thesis.tex", "README.md", "logs/events", "__0_0.distcp.bak")},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KEPT)
def test_folder_without_a_checkpoint_is_not_replaced(tmp_path: Path, form: Form, kind: str) -> None:
    path = tmp_path / "results"
    KEPT[kind](path)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="results") as raised:
        save(path, form)
    assert "Saving there would delete" in str(raised.value)
    with pytest.raises(CheckpointError):  # a background save raises before training continues
        prepared(path, form).stage(Staging())
    assert tree(tmp_path) == before


@pytest.mark.parametrize("form", FORMS)
def test_link_to_a_folder_without_a_checkpoint_is_not_replaced(tmp_path: Path, form: Form) -> None:
    thesis(tmp_path / "elsewhere")
    (tmp_path / "results").symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        save(tmp_path / "results", form)
    assert (tmp_path / "results").is_symlink()


def test_ordinary_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    for name in ("notes.txt", "tensor.pt"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(CheckpointError, match=f"a file at .*{name}"):
            save(tmp_path / name, "sharded")
        assert (tmp_path / name).read_bytes() == before
        save(tmp_path / name, "full")  # as torch.save does


def of_dcp(path: Path) -> None:
    dcp.save({"state_dict": {"a": torch.ones(3)}}, checkpoint_id=path, no_dist=True)
    torch.save({}, path / "meta.pt")


def link(path: Path) -> None:
    save(path.with_name("newest.ckpt"), "sharded")
    path.symlink_to("newest.ckpt")


def incomplete(path: Path) -> None:
    save(path, "sharded")
    (path / ".metadata").unlink()
    (path / "manifest.json").unlink()


OF_DEEPSPEED = [f"checkpoint/bf16_zero_pp_rank_0_mp_rank_00_{kind}_states.pt" for kind in ("model", "optim")]
REPLACED = {
    "nothing": lambda path: None,
    "empty": Path.mkdir,
    "of the system": written({".DS_Store": ""}),
    "full": lambda path: save(path, "full"),
    "sharded": lambda path: save(path, "sharded"),
    "opened on a Mac": checkpoint_with(".DS_Store", "._meta.pt"),
    "of DCP": of_dcp,
    "of DeepSpeed": written(dict.fromkeys(OF_DEEPSPEED, "states") | {"latest": "checkpoint", "zero_to_fp32.py": ""}),
    "of Lightning": lambda path: torch.save({"state_dict": {}}, path),
    "link": link,
    "incomplete": incomplete,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", REPLACED)
def test_checkpoints_are_replaced(tmp_path: Path, form: Form, kind: str) -> None:
    path = tmp_path / "last.ckpt"
    REPLACED[kind](path)
    save(path, form)
    assert peek(path)[1]["global_step"] == 1
    assert path.is_dir() == (form == "sharded")
    assert not path.is_symlink()


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
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert os.listdir(path) == ["thesis.tex"]


# Removing


def test_removing_keeps_other_files(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    checkpoint_with("thesis.tex")(path)
    with pytest.warns(UserWarning, match=r"best\.ckpt was removed except for .*: thesis\.tex"):
        remove_at(str(path))
    assert tree(tmp_path) == {"best.ckpt": None, "best.ckpt/thesis.tex": b"mine"}
    with pytest.warns(UserWarning, match="not a checkpoint, and was not removed"):
        remove_at(str(path))
    assert (path / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("kind", [kind for kind in REPLACED if kind != "incomplete"])
def test_checkpoints_are_removed(tmp_path: Path, kind: str) -> None:
    REPLACED[kind](tmp_path / "x.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remove_at(str(tmp_path / "x.ckpt"))
    assert os.listdir(tmp_path) == (["newest.ckpt"] if kind == "link" else [])


# Behind a URL


@pytest.fixture
def memory() -> Any:
    found = fsspec.filesystem("memory")
    if found.exists("/owned"):
        found.rm("/owned", recursive=True)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_folders_behind_urls_are_not_replaced(memory: Any, form: Form) -> None:
    memory.pipe({"/owned/results/thesis.tex": b"mine", "/owned/results/more/x": b"mine"})
    with pytest.raises(CheckpointError, match=r"memory://owned/results, which contains thesis\.tex, more, but"):
        save("memory://owned/results", form)
    with pytest.warns(UserWarning, match="not a checkpoint, and was not removed"):
        remove_at("memory://owned/results")
    assert sorted(memory.find("/owned")) == ["/owned/results/more/x", "/owned/results/thesis.tex"]


@pytest.mark.parametrize("form", FORMS)
def test_files_beside_a_checkpoint_behind_a_url_are_kept(memory: Any, form: Form) -> None:
    save("memory://owned/x.ckpt", "sharded")
    memory.pipe("/owned/x.ckpt/thesis.tex", b"mine")
    with pytest.raises(CheckpointError, match=r"contains other files: thesis\.tex"):
        save("memory://owned/x.ckpt", form)
    with pytest.warns(UserWarning, match=r"removed except for .*thesis\.tex"):
        remove_at("memory://owned/x.ckpt")
    assert memory.find("/owned") == ["/owned/x.ckpt/thesis.tex"]


def test_checkpoints_behind_urls_are_replaced_and_removed(memory: Any) -> None:
    for form in (*["sharded"] * 2, *["full"] * 2):  # unlike in an object store, a folder cannot replace a file here
        save("memory://owned/x.ckpt", form)  # type: ignore[arg-type]
        assert peek("memory://owned/x.ckpt")[1]["global_step"] == 1
    remove_at("memory://owned/x.ckpt")
    assert memory.find("/owned") == []
    memory.pipe("/owned/notes.txt", b"mine")
    with pytest.raises(CheckpointError, match=r"a file at memory://owned/notes\.txt"):
        save("memory://owned/notes.txt", "sharded")


# In a run


def fit(folder: Path, strategy: Any, plugins: Any = None, **options: Any) -> list[str]:
    callback = ModelCheckpoint(folder, save_top_k=1, monitor="step", mode="max", **options)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=3, limit_train_batches=1, limit_val_batches=0,
        logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback], plugins=plugins,
    )  # fmt: skip
    trainer.fit(BoringModel())
    if dist.is_initialized():
        dist.destroy_process_group()  # Lightning's `ddp` leaves it
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("in_background", [True, False])
def test_model_checkpoint_replaces_its_own(tmp_path: Path, in_background: bool) -> None:
    def strategy() -> ParalDDPStrategy:
        return ParalDDPStrategy(checkpoint=CheckpointOptions("sharded", async_save=in_background))

    for _ in range(2):
        names = fit(tmp_path, strategy(), save_last=True, enable_version_counter=False)
        assert names == ["epoch=2-step=3.ckpt", "last.ckpt"]
    shutil.rmtree(tmp_path / "last.ckpt")
    thesis(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"last\.ckpt, which contains thesis\.tex, but"):
        fit(tmp_path, strategy(), save_last=True, enable_version_counter=False)
    assert os.listdir(tmp_path / "last.ckpt") == ["thesis.tex"]
