"""`paral inspect`, `paral verify` and `paral consolidate`, on every kind of checkpoint and on other files."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy
from lightning_paral.cli import main
from tests.distributed.checkpoint.test_damage import Payload
from tests.distributed.checkpoint.test_foreign import save_with_ddp_of_lightning, save_with_deepspeed
from tests.models.resumable import SAVED_AFTER, Resumable, fit

COMMANDS = ("inspect", "verify", "consolidate")
STEP = SAVED_AFTER // 2


def save_all(folder: str) -> None:
    fit(ParalDDPStrategy(checkpoint="full"), 2, save_to=f"{folder}/full")
    fit(ParalFSDPStrategy(checkpoint="sharded"), 2, save_to=f"{folder}/sharded")
    save_with_ddp_of_lightning(f"{folder}/lightning")
    save_with_deepspeed(f"{folder}/deepspeed2", "32-true", {"stage": 2})
    save_with_deepspeed(f"{folder}/deepspeed3", "32-true", {"stage": 3})


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    rank_pool.run(2, save_all, str(folder), timeout=300)
    return folder


@pytest.fixture
def paral(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs a command and returns its output, or its error. `consolidate` writes to a temporary file."""

    def run(command: str, path: str | Path, *options: str) -> str:
        out = [str(tmp_path / "out.ckpt")] if command == "consolidate" else []
        monkeypatch.setattr(sys, "argv", ["paral", command, str(path), *out, *options])
        capsys.readouterr()
        try:
            main()
        except SystemExit as end:
            return str(end)
        return capsys.readouterr().out

    return run


TABLE = [
    ("full", "full", "ParalDDPStrategy", 2),
    ("sharded", "sharded", "ParalFSDPStrategy", 2),
    ("lightning", "of another tool", None, None),
    ("deepspeed2", "of another tool", None, None),
    ("deepspeed3", "of another tool", None, None),
]


@pytest.mark.parametrize(("name", "form", "strategy", "world_size"), TABLE)
def test_inspect_as_json(
    saved: Path, paral, name: str, form: str, strategy: str | None, world_size: int | None
) -> None:
    told = json.loads(paral("inspect", saved / name, "--json"))

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
    if not name.startswith("deepspeed"):  # DeepSpeed has its own format for optimizer states
        moments = [key for key in tensors if key.startswith("optimizer_0.") and key.endswith(".exp_avg")]
        assert len(moments) == sum(parameter.requires_grad for parameter in Resumable().parameters())
    assert told["bytes"] == sum(tensor["bytes"] for tensor in told["tensors"])


@pytest.mark.parametrize("name", [name for name, *_ in TABLE])
def test_inspect_as_table(saved: Path, paral, name: str) -> None:
    printed = paral("inspect", saved / name)
    assert "state_dict.first.weight" in printed
    assert "7x5" in printed


@pytest.mark.parametrize("name", [name for name, *_ in TABLE])
def test_every_kind_of_checkpoint_is_verified_and_consolidated(saved: Path, tmp_path: Path, paral, name: str) -> None:
    said = paral("verify", saved / name)
    assert said.startswith(f"{saved / name}: ")
    assert ("complete and undamaged" if name in ("full", "sharded") else "It has no manifest") in said

    assert paral("consolidate", saved / name) == f"{tmp_path / 'out.ckpt'}\n"
    assert paral("verify", tmp_path / "out.ckpt").endswith("bytes.\n")
    Resumable.load_from_checkpoint(tmp_path / "out.ckpt")


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_commands_take_urls(saved: Path, tmp_path: Path, paral, form: str) -> None:
    url = f"memory://commands/{form}.ckpt"
    memory = fsspec.filesystem("memory")
    memory.put(str(saved / form), f"/commands/{form}.ckpt", recursive=True)

    assert json.loads(paral("inspect", url, "--json"))["global_step"] == STEP
    assert "complete and undamaged" in paral("verify", url)
    paral("consolidate", url)
    expected = torch.load(saved / "full")["state_dict"]
    found = torch.load(tmp_path / "out.ckpt")["state_dict"]
    for name, _ in Resumable().named_parameters():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    assert json.loads(paral("inspect", f"file://{saved / form}", "--json"))["global_step"] == STEP


def test_safetensors(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["paral", "consolidate", str(saved / "sharded"), str(tmp_path / "x.safetensors")])
    main()
    for name, value in load_file(tmp_path / "x.safetensors").items():
        assert value.shape == Resumable().state_dict()[name].shape


# Other files


def nothing(folder: Path) -> Path:
    return folder / "nowhere"


def empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def text(folder: Path) -> Path:
    (folder / "notes.txt").write_text("no checkpoint")
    return folder / "notes.txt"


def weights_alone(folder: Path) -> Path:
    torch.save(Resumable().state_dict(), folder / "weights.pt")
    return folder / "weights.pt"


def nothing_at_url(folder: Path) -> str:
    return "memory://nowhere/x.ckpt"


def unknown_protocol(folder: Path) -> str:
    return "nonsense://x.ckpt"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (nothing, "There is no checkpoint at"),
        (nothing_at_url, "There is no checkpoint at memory://nowhere"),
        (unknown_protocol, "Protocol not known"),
        (empty_folder, "is not a checkpoint"),
        (text, "not a checkpoint"),
        (weights_alone, "is not a checkpoint: it has no 'state_dict'"),
    ],
)
def test_path_without_a_checkpoint_is_an_error_of_one_line(
    tmp_path: Path, paral, command: str, make: Any, reason: str
) -> None:
    said = paral(command, make(tmp_path))
    assert said.startswith("paral: ")
    assert reason in said
    assert "\n" not in said
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_unreadable_checkpoint_is_an_error_of_one_line(saved: Path, paral, command: str, form: str) -> None:
    folder = Path("/tmp") / f"unreadable-{os.getpid()}"  # tmp_path is for its owner only
    folder.mkdir()
    path = folder / form
    (shutil.copytree if form == "sharded" else shutil.copy)(saved / form, path)
    path.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root may read everything
        said = paral(command, path)
    finally:
        os.seteuid(user)
        path.chmod(0o700)
        shutil.rmtree(folder)
    assert said.startswith("paral: ")
    assert "Permission denied" in said
    assert str(path) in said


def test_output_must_be_a_local_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["paral", "consolidate", str(saved / "full"), "memory://out.ckpt"])
    with pytest.raises(SystemExit, match=r"memory://out\.ckpt is a URL"):
        main()


@pytest.mark.parametrize("command", COMMANDS)
def test_code_runs_only_with_trust(saved: Path, tmp_path: Path, paral, command: str) -> None:
    witness = tmp_path / "ran"
    torch.save(torch.load(saved / "lightning") | {"extra": Payload(witness)}, tmp_path / "x.ckpt")
    said = paral(command, tmp_path / "x.ckpt")
    assert "posix.mkdir" in said
    assert "--trust" in said
    assert not witness.exists()
    paral(command, tmp_path / "x.ckpt", "--trust")
    assert witness.exists()
