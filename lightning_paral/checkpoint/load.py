"""Loading: find out what is at a path, verify it, and return it as Lightning dumps it, tensors unread."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_paral.checkpoint.damage import naming, verify_blocks
from lightning_paral.checkpoint.formats.deepspeed import find_folder, read_deepspeed
from lightning_paral.checkpoint.formats.full import read_full
from lightning_paral.checkpoint.formats.sharded import META, METADATA
from lightning_paral.checkpoint.formats.sharded_reader import read_meta, read_tree
from lightning_paral.checkpoint.io.storage import LocalStorage, folder_at
from lightning_paral.checkpoint.lazy_tensor import materialize
from lightning_paral.checkpoint.manifest import FILE_NAME, Manifest
from lightning_paral.checkpoint.resolve import read_manifest, read_present
from lightning_paral.checkpoint.save_plan import CURRENT_KEY, is_large
from lightning_paral.checkpoint.state.optimizer import OTHER_ENTRIES_KEY, to_int_keys
from lightning_paral.checkpoint.state.weights import PACKAGE_STATE_KEY
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.errors import CheckpointError


def load(path: str | Path, ranks: RankGroup, *, weights_only: bool = True) -> dict[str, Any]:
    """Return the checkpoint at `path`, verified, with tensors that are read when they are used. *Collective*.

    Args:
        path: a file or folder of this package, Lightning or DeepSpeed.
        ranks: who loads; they share the work of verifying.
        weights_only: `False` trusts the file, and runs what code it holds.

    Raises:
        CheckpointError: there is none, or it is damaged; on all ranks, with the file's name.
    """
    what = f"Loading {path}"

    def read(here: str | Path) -> dict[str, Any]:
        manifest = ranks.on_first(what, lambda: read_manifest(here))  # what follows depends on it on all ranks
        if manifest is not None:
            ranks.each(what, lambda: verify_blocks(here, manifest, ranks))
        return ranks.each(what, lambda: open_checkpoint(here, weights_only=weights_only, manifest=manifest))

    return read_present(path, ranks, read)


def peek(path: str | Path, *, weights_only: bool = True) -> tuple[Manifest | None, dict[str, Any]]:
    """Return manifest and contents of the checkpoint at `path`, which are not verified, in this process alone.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """

    def read(here: str | Path) -> tuple[Manifest | None, dict[str, Any]]:
        manifest = read_manifest(here)
        return manifest, open_checkpoint(here, weights_only=weights_only, manifest=manifest)

    return read_present(path, RankGroup(), read)


def open_checkpoint(path: str | Path, *, weights_only: bool = True, manifest: Manifest | None = None) -> dict[str, Any]:
    """Return what is at `path` as Lightning dumps it: `state_dict`, `optimizer_states` by number, and all else.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    with naming(path):
        checkpoint = _open(path, weights_only, manifest)
        if weights_only:
            _check_form(path, checkpoint)
        return checkpoint


def _check_form(path: str | Path, checkpoint: dict[str, Any]) -> None:
    """Raise if what is always a dict or list in a checkpoint is none in this one."""
    states = checkpoint.get("optimizer_states", [])
    fits = isinstance(checkpoint["state_dict"], Mapping) and isinstance(states, list)
    fits = fits and all(isinstance(name, str) for name in checkpoint["state_dict"])
    if not fits or not all(map(_is_state, states)):
        raise CheckpointError(f"{path} is damaged, or no checkpoint: its state_dict or optimizer_states are none.")


def _is_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or not isinstance(state.get("state", {}), Mapping):
        return False
    groups = state.get("param_groups", [])
    return isinstance(groups, list) and all(
        isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups
    )


def _open(path: str | Path, weights_only: bool, manifest: Manifest | None) -> dict[str, Any]:
    folder = folder_at(path)
    if isinstance(folder, LocalStorage):
        if folder.path.is_file():
            checkpoint = read_full(folder.path, weights_only)
            if "state_dict" not in checkpoint:
                raise CheckpointError(f"{path} is no checkpoint: it has no 'state_dict'.")
            return checkpoint
        of_deepspeed = find_folder(folder.path)
        if of_deepspeed is not None:
            return read_deepspeed(of_deepspeed, weights_only)
    names = manifest.names if manifest is not None else {}
    if folder.size(names.get(METADATA, METADATA)) is None:
        raise CheckpointError(f"{path} is no checkpoint: it has no file {METADATA}.")
    checkpoint = read_meta(folder, names.get(META, META), weights_only)
    if PACKAGE_STATE_KEY in checkpoint and manifest is None:
        raise CheckpointError(f"{folder.name(FILE_NAME)} is missing: the checkpoint is incomplete.")
    if any(not isinstance(key, str) for key in checkpoint):
        raise CheckpointError(f"{folder.name(META)} is damaged: its keys are no names.")
    tree = read_tree(folder, names.get(METADATA, METADATA), contiguous=manifest is not None, weights_only=weights_only)
    weights = tree.pop("state_dict", None)
    checkpoint["state_dict"] = tree.pop("model", {}) if weights is None else weights
    if CURRENT_KEY in tree:
        checkpoint[CURRENT_KEY] = tree.pop(CURRENT_KEY)
    numbers = sorted(int(key.removeprefix("optimizer_")) for key in tree if is_large(key))
    optimizers = [tree.pop(f"optimizer_{number}") for number in numbers]
    if manifest is not None:
        _fill(checkpoint, tree)
    if optimizers:
        beside = checkpoint.pop(OTHER_ENTRIES_KEY, [{}] * len(optimizers))
        checkpoint["optimizer_states"] = [more | to_int_keys(s) for more, s in zip(beside, optimizers, strict=True)]
    return checkpoint


def _fill(holes: Any, values: Any) -> None:
    """Put the tensors in `values`, read, to their places in `holes`: what callbacks hold of divided tensors."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, Tensor):
            holes[key] = materialize(value)
        elif value is not None:
            _fill(holes[key], value)
