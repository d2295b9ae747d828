"""Damage is found and named before any weight changes, and code in a checkpoint never runs."""

import os
import pickle
import shutil
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_paral import CheckpointError
from lightning_paral.checkpoint.load import load, verify
from lightning_paral.distributed.exchange import RankGroup
from tests.models.resumable import Resumable, losses, refusal


def save_both(folder: str) -> None:
    losses("paral_ddp", checkpoint="full", save_to=f"{folder}/full")
    losses("paral_fsdp", checkpoint="sharded", save_to=f"{folder}/sharded")


@pytest.fixture(scope="module")
def sound(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    rank_pool.run(2, save_both, str(folder))
    return folder


FILES = [
    ("full", ""),
    *(("sharded", name) for name in ("__0_0.distcp", "__1_0.distcp", "meta.pt", ".metadata", "manifest.json")),
]


def copy_of(sound: Path, form: str, tmp_path: Path) -> Path:
    target = tmp_path / "x"
    (shutil.copytree if (sound / form).is_dir() else shutil.copy)(sound / form, target)
    return target


class Watch(Callback):
    """Records the weights when a fit fails, before teardown."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        full = getattr(trainer.strategy, "full_parameter", torch.clone)
        self.weights = {name: full(parameter).detach() for name, parameter in pl_module.named_parameters()}
        self.weights |= {name: buffer.clone() for name, buffer in pl_module.named_buffers()}


def load_into_changed(strategy: str, path: str) -> str:
    """Load into a module with other weights and return the error. Assert that the weights do not change."""
    torch.manual_seed(99)
    module, watch = Resumable(), Watch()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    message = refusal(strategy, lambda: module, resume_from=path, callbacks=[watch])
    assert watch.weights.keys() == before.keys() - {"tied.weight"}
    assert [name for name, value in watch.weights.items() if not torch.equal(value, before[name])] == []
    return message


@pytest.mark.parametrize(("form", "name"), FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damage_is_named_by_verify_and_by_loading(
    sound: Path, tmp_path: Path, form: str, name: str, damage: str
) -> None:
    path = copy_of(sound, form, tmp_path)
    file = path / name if name else path
    size = file.stat().st_size
    places = [size // 7, size // 2, size - 40] if damage == "flip" else [size // 2]
    data = file.read_bytes()
    for place in places:
        if damage == "flip":
            file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        elif damage == "truncate":
            file.write_bytes(data[:place])
        else:
            file.unlink()
        (fault, *_) = verify(path)
        assert str(file) in fault
        with pytest.raises(CheckpointError) as raised:
            load(path, RankGroup())
        assert str(file) in str(raised.value)


def test_change_of_any_byte_of_a_full_file_is_found(sound: Path, tmp_path: Path) -> None:
    path = copy_of(sound, "full", tmp_path)
    data = bytearray(path.read_bytes())
    step = max(1, len(data) // 400)
    for place in [*range(0, len(data) - 3000, step), *range(len(data) - 3000, len(data))]:
        data[place] ^= 0x10
        path.write_bytes(data)
        assert verify(path), f"byte {place} of {len(data)} can change unseen"
        data[place] ^= 0x10
    path.write_bytes(data)
    assert verify(path) == []


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero3"])
def test_no_weight_changes_on_any_rank_when_one_file_is_damaged(
    on_ranks, sound: Path, tmp_path: Path, strategy: str
) -> None:
    path = copy_of(sound, "sharded", tmp_path)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        data = (path / name).read_bytes()
        place = len(data) // 2
        (path / name).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        for message in on_ranks(2, load_into_changed, strategy, str(path)):
            assert f"{name} is damaged" in message
        (path / name).write_bytes(data)


# Hostile files


def without_manifest(sound: Path, tmp_path: Path) -> Path:
    """Return a copy without a manifest, as other tools write, so that no checksum fails first."""
    path = copy_of(sound, "sharded", tmp_path)
    (path / "manifest.json").unlink()
    meta = torch.load(path / "meta.pt")
    del meta["lightning_paral"]
    torch.save(meta, path / "meta.pt")
    return path


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


class Settings:
    """A harmless user type."""

    def __init__(self) -> None:
        self.depth = 3


def test_code_in_metadata_never_runs(sound: Path, tmp_path: Path) -> None:
    path, payload = without_manifest(sound, tmp_path), Payload(tmp_path / "ran")
    (path / ".metadata").write_bytes(pickle.dumps(payload))
    for trusted in ({"weights_only": False}, None):
        assert "posix.mkdir" in refusal("paral_ddp", checkpoint=trusted, resume_from=path)
    assert not payload.witness.exists()


def hostile_file(sound: Path, path: Path, payload: Payload) -> Path:
    torch.save(torch.load(sound / "full") | {"extra": payload}, path)
    return path


@pytest.mark.parametrize("label", ["paral_ddp", "paral_fsdp", "paral_zero1", "paral_zero3"])
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_code_runs_only_if_the_file_is_trusted(on_ranks, sound: Path, tmp_path: Path, label: str, form: str) -> None:
    payload = Payload(tmp_path / "ran")
    if form == "sharded":
        path = without_manifest(sound, tmp_path)
        torch.save(torch.load(path / "meta.pt") | {"callbacks": payload}, path / "meta.pt")
    else:
        path = hostile_file(sound, tmp_path / "x.ckpt", payload)
    for checkpoint in (None, {"weights_only": True}):
        (message,) = on_ranks(1, partial(refusal, label, checkpoint=checkpoint, resume_from=path))
        assert "posix.mkdir" in message
        assert "add_safe_globals([mkdir])" in message
        assert "CheckpointOptions(weights_only=False)" in message
        assert not payload.witness.exists()
    on_ranks(1, partial(losses, label, checkpoint={"weights_only": False}, resume_from=path))
    assert payload.witness.exists()


def test_argument_of_trainer_fit_takes_precedence(sound: Path, tmp_path: Path) -> None:
    payload = Payload(tmp_path / "ran")
    path = hostile_file(sound, tmp_path / "x.ckpt", payload)
    trusting = {"weights_only": False}
    assert "posix.mkdir" in refusal("paral_ddp", checkpoint=trusting, resume_from=path, weights_only=True)
    assert not payload.witness.exists()
    losses("paral_ddp", resume_from=path, weights_only=False)
    assert payload.witness.exists()


class WithState(Resumable):
    """Has state that is not a tensor, which a sharded checkpoint stores with the tensors."""

    def get_extra_state(self) -> Settings:
        return Settings()

    def set_extra_state(self, state: Settings) -> None:
        self.depth = state.depth


def test_trust_includes_objects_stored_with_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    losses("paral_ddp", WithState, checkpoint="sharded", save_to=path)
    assert "Settings" in refusal("paral_ddp", WithState, resume_from=path)
    module = WithState()
    losses("paral_ddp", lambda: module, checkpoint={"weights_only": False}, resume_from=path)
    assert module.depth == 3


def test_users_types_are_named_and_load_once_they_are_trusted(tmp_path: Path, sound: Path) -> None:
    torch.save(torch.load(sound / "full") | {"settings": Settings()}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"test_damage\.Settings.*add_safe_globals\(\[Settings\]\)"):
        load(tmp_path / "x.ckpt", RankGroup())
    with torch.serialization.safe_globals([Settings]):
        assert load(tmp_path / "x.ckpt", RankGroup())["settings"].depth == 3
    assert load(tmp_path / "x.ckpt", RankGroup(), weights_only=False)["settings"].depth == 3


class Keeping(Callback):
    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict["kept"]


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_other_types_need_trust(tmp_path: Path, form: str) -> None:
    path = tmp_path / "x.ckpt"
    losses("paral_ddp", checkpoint=form, save_to=path, callbacks=[Keeping(Fraction(1, 3))])
    assert "fractions.Fraction" in refusal("paral_ddp", resume_from=path, callbacks=[Keeping()])
    trusted = Keeping()
    losses("paral_ddp", checkpoint={"weights_only": False}, resume_from=path, callbacks=[trusted])
    assert trusted.kept == Fraction(1, 3)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_object_that_cannot_be_copied_fails_a_background_save(tmp_path: Path, form: str) -> None:
    callbacks, checkpoint = [Keeping(x for x in range(3))], {"form": form, "async_save": True}
    message = refusal("paral_ddp", checkpoint=checkpoint, save_to=tmp_path / "x.ckpt", callbacks=callbacks)
    assert "x.ckpt failed: TypeError: cannot pickle 'generator'" in message
    assert not (tmp_path / "x.ckpt").exists()
