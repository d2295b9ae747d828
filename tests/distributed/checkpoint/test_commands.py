"""`paral inspect`, `paral verify` and `paral consolidate`, on every kind of checkpoint and on other files."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.distributed.checkpoint.test_damage import Payload
from tests.distributed.checkpoint.test_foreign import ddp_of_lightning
from tests.models.resumable import SAVED_AFTER, Resumable, losses

COMMANDS = ("inspect", "verify", "consolidate")
STEP = SAVED_AFTER // 2


def save_all(folder: str) -> None:
    losses("paral_ddp", checkpoint="full", save_to=f"{folder}/full")
    losses("paral_fsdp", checkpoint="sharded", save_to=f"{folder}/sharded")
    losses(ddp_of_lightning, save_to=f"{folder}/lightning")


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    rank_pool.run(2, save_all, str(folder), timeout=300)
    return folder


@pytest.fixture
def run(paral, tmp_path: Path) -> Any:
    """A function that runs a command for a checkpoint. `consolidate` writes to a temporary file."""

    def run(command: str, path: str | Path, *options: str) -> str:
        out = [tmp_path / "out.ckpt"] if command == "consolidate" else []
        return paral(command, path, *out, *options)

    return run


TABLE = [
    ("full", "full", "ParalDDPStrategy", 2),
    ("sharded", "sharded", "ParalFSDPStrategy", 2),
    ("lightning", "of another tool", None, None),
]


@pytest.mark.parametrize(("name", "form", "strategy", "world_size"), TABLE)
def test_inspect(saved: Path, run, name: str, form: str, strategy: str | None, world_size: int | None) -> None:
    told = json.loads(run("inspect", saved / name, "--json"))

    assert (told["form"], told["strategy"], told["world_size"]) == (form, strategy, world_size)
    assert (told["epoch"], told["global_step"]) == (0, STEP)
    tensors = {tensor["name"]: tensor for tensor in told["tensors"]}
    expected = Resumable().state_dict()
    weights = {key.removeprefix("state_dict."): tensor for key, tensor in tensors.items() if key.startswith("state")}
    assert weights.keys() == expected.keys()
    for key, tensor in weights.items():
        assert tensor["shape"] == list(expected[key].shape)
        assert tensor["bytes"] == expected[key].nbytes
        assert tensor["dtype"] == str(expected[key].dtype).removeprefix("torch.")
    moments = [key for key in tensors if key.startswith("optimizer_0.") and key.endswith(".exp_avg")]
    assert len(moments) == sum(parameter.requires_grad for parameter in Resumable().parameters())
    assert told["bytes"] == sum(tensor["bytes"] for tensor in told["tensors"])
    table = run("inspect", saved / name)
    assert "state_dict.first.weight" in table
    assert "[7, 5]" in table


@pytest.mark.parametrize("name", [name for name, *_ in TABLE])
def test_every_kind_of_checkpoint_is_verified_and_consolidated(saved: Path, tmp_path: Path, run, name: str) -> None:
    said = run("verify", saved / name)
    assert said.startswith(f"{saved / name}: ")
    assert ("complete and undamaged" if name in ("full", "sharded") else "It has no manifest") in said

    assert run("consolidate", saved / name) == f"{tmp_path / 'out.ckpt'}\n"
    assert run("verify", tmp_path / "out.ckpt").endswith("bytes.\n")
    Resumable.load_from_checkpoint(tmp_path / "out.ckpt")


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_commands_take_urls(saved: Path, tmp_path: Path, run, form: str) -> None:
    url = f"memory://commands/{form}.ckpt"
    memory = fsspec.filesystem("memory")
    memory.put(str(saved / form), f"/commands/{form}.ckpt", recursive=True)

    assert json.loads(run("inspect", url, "--json"))["global_step"] == STEP
    assert "complete and undamaged" in run("verify", url)
    run("consolidate", url)
    expected = torch.load(saved / "full")["state_dict"]
    found = torch.load(tmp_path / "out.ckpt")["state_dict"]
    for name, _ in Resumable().named_parameters():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    assert json.loads(run("inspect", f"file://{saved / form}", "--json"))["global_step"] == STEP


# Other files


def empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def text(folder: Path) -> Path:
    (folder / "notes.txt").write_text("no checkpoint")
    return folder / "notes.txt"


def weights_alone(folder: Path) -> Path:
    torch.save(Resumable().state_dict(), folder / "weights.pt")
    return folder / "weights.pt"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder / "nowhere", "There is no checkpoint at"),
        (lambda _: "memory://nowhere/x.ckpt", "There is no checkpoint at memory://nowhere"),
        (lambda _: "nonsense://x.ckpt", "Protocol not known"),
        (empty_folder, "is not a checkpoint"),
        (text, "not a checkpoint"),
        (weights_alone, "is not a checkpoint: it has no 'state_dict'"),
    ],
)
def test_path_without_a_checkpoint_is_an_error_of_one_line(
    tmp_path: Path, run, command: str, make: Any, reason: str
) -> None:
    said = run(command, make(tmp_path))
    assert said.startswith("paral: ")
    assert reason in said
    assert "\n" not in said
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_unreadable_checkpoint_is_an_error_of_one_line(saved: Path, run, command: str, form: str) -> None:
    folder = Path("/tmp") / f"unreadable-{os.getpid()}"  # tmp_path is for its owner only
    folder.mkdir()
    path = folder / form
    (shutil.copytree if form == "sharded" else shutil.copy)(saved / form, path)
    path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root may read everything
        said = run(command, path)
    finally:
        os.seteuid(user)
        path.chmod(0o700)
        shutil.rmtree(folder)
    assert said.startswith("paral: ")
    assert "Permission denied" in said
    assert str(path) in said


def test_output_must_be_a_local_file(saved: Path, paral) -> None:
    assert "memory://out.ckpt is a URL" in paral("consolidate", saved / "full", "memory://out.ckpt")


@pytest.mark.parametrize("command", COMMANDS)
def test_code_runs_only_with_trust(saved: Path, tmp_path: Path, run, command: str) -> None:
    witness = tmp_path / "ran"
    torch.save(torch.load(saved / "lightning") | {"extra": Payload(witness)}, tmp_path / "x.ckpt")
    said = run(command, tmp_path / "x.ckpt")
    assert "posix.mkdir" in said
    assert "--trust" in said
    assert not witness.exists()
    run(command, tmp_path / "x.ckpt", "--trust")
    assert witness.exists()
