"""`paral consolidate` writes safetensors that other tools read, in the given dtype, and no partial files."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.exchange import RankGroup
from tests.launching import outputs
from tests.models.resumable import losses

TIED = {"second.weight", "tied.weight"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "x.ckpt"
    losses("paral_ddp", checkpoint="sharded", save_to=path)
    return path


@pytest.fixture
def consolidate(paral) -> Any:
    """A function that runs the command and returns the files that it names, or its error."""

    def run(*arguments: Any) -> list[Path] | str:
        said = paral("consolidate", *arguments)
        return said if said.startswith("paral: ") else [Path(line) for line in said.splitlines()]

    return run


def weights(path: Path) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in load(path, RankGroup())["state_dict"].items()}


def check_weights(found: dict[str, Tensor], saved: Path, dtype: torch.dtype | None = None) -> None:
    expected = weights(saved)
    assert found.keys() | TIED == expected.keys()
    assert len(found.keys() & TIED) == 1, "safetensors holds tied weights once"
    for name, value in found.items():
        cast = expected[name].to(dtype) if dtype and expected[name].is_floating_point() else expected[name]
        assert value.dtype == cast.dtype
        assert torch.equal(value, cast), name


@pytest.mark.parametrize(("option", "dtype"), [(None, None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_safetensors_hold_the_weights(
    saved: Path, tmp_path: Path, consolidate: Any, option: str | None, dtype: torch.dtype | None
) -> None:
    (out,) = consolidate(saved, tmp_path / "model.safetensors", *([] if option is None else ["--dtype", option]))
    assert [path.name for path in tmp_path.iterdir()] == [out.name] == ["model.safetensors"]
    check_weights(load_file(out), saved, dtype)


def test_dtype_of_a_lightning_file(saved: Path, tmp_path: Path, consolidate: Any) -> None:
    (out,) = consolidate(saved, tmp_path / "new" / "x.ckpt", "--dtype", "bf16", "--weights-only")
    found = torch.load(out, weights_only=True)
    assert not {"optimizer_states", "callbacks", "lr_schedulers"} & found.keys()
    assert found["state_dict"].keys() == weights(saved).keys()
    check_weights(
        {name: value for name, value in found["state_dict"].items() if name != "tied.weight"}, saved, torch.bfloat16
    )
    assert found["state_dict"]["tied.weight"].data_ptr() == found["state_dict"]["second.weight"].data_ptr()


@pytest.mark.parametrize("name", ["new.ckpt", "new.safetensors"])
def test_square_weight_and_its_transpose_stay_separate(tmp_path: Path, consolidate: Any, name: str) -> None:
    weight = torch.randn(3, 3)
    torch.save({"state_dict": {"weight": weight, "transposed": weight.t()}}, tmp_path / "x.ckpt")

    (out,) = consolidate(tmp_path / "x.ckpt", tmp_path / name)

    found = load_file(out) if out.suffix == ".safetensors" else torch.load(out, weights_only=True)["state_dict"]
    assert torch.equal(found["weight"], weight)
    assert torch.equal(found["transposed"], weight.t())


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_folders_are_not_replaced(saved: Path, tmp_path: Path, consolidate: Any, name: str) -> None:
    out = tmp_path / name
    shutil.copytree(saved, out)
    message = consolidate(saved, out)
    assert message.startswith(f"paral: {out} is a folder. Write to a file: {out}/NAME{out.suffix}, or remove")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert {path.name for path in out.iterdir()} == {path.name for path in saved.iterdir()}


def test_safetensors_are_on_disk_although_nfs_keeps_the_mapped_file(
    saved: Path, tmp_path: Path, consolidate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, fsync = Path.unlink, os.fsync
    synced = []

    def unlink_on_nfs(path: Path, **options: Any) -> None:
        if path.name == "weights":
            path.rename(path.with_name(".nfs00c0ffee"))
        else:
            unlink(path, **options)

    def record(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(Path, "unlink", unlink_on_nfs)
    monkeypatch.setattr(os, "fsync", record)
    (out,) = consolidate(saved, tmp_path / "model.safetensors")
    check_weights(load_file(out), saved)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert synced[-2:] == [out.stat().st_ino, tmp_path.stat().st_ino]


def test_parent_that_is_a_file_is_an_error_of_one_line(saved: Path, tmp_path: Path, consolidate: Any) -> None:
    (tmp_path / "file").touch()
    message = consolidate(saved, tmp_path / "file" / "x.ckpt")
    assert "could not be written" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_lack_of_space_is_detected_before_writing(
    saved: Path, tmp_path: Path, consolidate: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    assert "Free some space, or write elsewhere" in consolidate(saved, tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_interruption_leaves_nothing(launch, tmp_path: Path, name: str) -> None:
    state = {"state_dict": {f"w{n}": torch.ones(2**23) for n in range(16)}}  # 512 MiB
    torch.save(state, tmp_path / "big.ckpt")
    folder = tmp_path / "out"
    folder.mkdir()
    arguments = [str(tmp_path / "big.ckpt"), str(folder / name)]
    process = launch("-m", "lightning_paral", "consolidate", *arguments)
    deadline = time.monotonic() + 60
    while not any(".saving-" in str(path) and path.is_file() and path.stat().st_size for path in folder.rglob("*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not begin to write"
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    (printed,) = outputs(process)
    assert process.returncode == 130, printed
    # Python prints this one itself if the signal comes while tqdm's constructor runs.
    own, _, of_tqdm = printed.partition("Exception ignored in: <function tqdm.__del__")
    assert "Traceback" not in own
    assert of_tqdm.count("Traceback") <= 1
    assert not list(folder.iterdir())
