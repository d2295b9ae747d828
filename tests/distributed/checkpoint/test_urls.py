"""Checkpoints behind URLs, through fsspec."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_paral import CheckpointError
from lightning_paral.checkpoint.load import load, verify
from lightning_paral.checkpoint.storage import folder_at
from lightning_paral.distributed.exchange import RankGroup
from tests.models.resumable import Losses, assert_continues, losses

FORMS = ("full", "sharded")


class SharedFileSystem(LocalFileSystem):
    """A file system for tests, shared by all processes as `shared://`, that behaves like `s3fs`.

    It remembers what it found until it is told not to, and takes a version in the second place of `cat_file`.
    """

    protocol = "shared"
    found: ClassVar[dict[str, Any]] = {}

    def info(self, path: Any, **kwargs: Any) -> Any:
        if path not in self.found:
            self.found[path] = super().info(path, **kwargs)
        return self.found[path]

    def invalidate_cache(self, path: Any = None) -> None:
        self.found.clear()

    def cat_file(self, path: Any, version_id: Any = None, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        assert version_id is None
        return super().cat_file(path, start=start, end=end, **kwargs)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("shared://"))


fsspec.register_implementation("shared", SharedFileSystem, clobber=True)


def save(url: str, form: str) -> Losses:
    """Save on a rank, which knows the file system as soon as it imports this function."""
    return losses("paral_fsdp", checkpoint=form, save_to=url)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_save_and_resume_behind_a_url(on_ranks, tmp_path: Path, form: str) -> None:
    url = f"shared://{tmp_path}/x.ckpt"
    for _ in range(2):  # one in place of the other
        whole = on_ranks(2, save, url, form)
    assert_continues(on_ranks(2, partial(losses, "paral_fsdp", resume_from=url)), whole)
    if form == "sharded":
        assert len(list((tmp_path / "x.ckpt").glob("*.distcp"))) == 2
    assert verify(tmp_path / "x.ckpt") == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_background", [False, True])
def test_memory_file_system(form: str, in_background: bool) -> None:
    url = f"memory://{in_background}/{form}.ckpt"
    whole = losses("paral_ddp", checkpoint={"form": form, "async_save": in_background}, save_to=url)
    assert verify(url) == []
    assert_continues([losses("paral_ddp", resume_from=url)], [whole])
    with pytest.raises(CheckpointError, match="There is no checkpoint at memory://"):
        load("memory://checkpoints/none", RankGroup())


def test_model_checkpoint_saves_behind_a_url() -> None:
    callback = ModelCheckpoint("memory://checkpoints", filename="x", every_n_train_steps=5)
    losses("paral_ddp", callbacks=[callback], enable_checkpointing=True, accumulate_grad_batches=1)
    assert load("memory://checkpoints/x.ckpt", RankGroup())["global_step"] == 10


def test_damage_behind_a_url_is_named_by_the_url() -> None:
    url = "memory://damage/x.ckpt"
    losses("paral_ddp", checkpoint="full", save_to=url)
    memory = fsspec.filesystem("memory")
    memory.pipe("/damage/x.ckpt", memory.cat("/damage/x.ckpt")[:-10])
    assert url in verify(url)[0]
    with pytest.raises(CheckpointError, match=url) as raised:
        load(url, RankGroup())
    assert "lightning_paral_" not in str(raised.value)


def test_files_written_by_other_processes_behind_a_url_are_seen(tmp_path: Path) -> None:
    for nbytes in (2, 3):
        (tmp_path / "x").write_bytes(bytes(nbytes))
        assert folder_at(f"shared://{tmp_path}").size("x") == nbytes


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_missing_file_system_is_named_with_its_extra() -> None:
    (fault,) = verify("s3://bucket/x.ckpt")
    assert "pip install 'lightning_paral[s3]'" in fault
