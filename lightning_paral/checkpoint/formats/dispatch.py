"""Open a checkpoint of any format: one file or a sharded folder. Those of DeepSpeed are refused with a remedy."""

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from torch import Tensor

from lightning_paral.checkpoint.formats.full import read_full
from lightning_paral.checkpoint.formats.sharded import META, METADATA, read_meta, read_tree
from lightning_paral.checkpoint.io.storage import Folder, LocalStorage, folder_at
from lightning_paral.checkpoint.lazy_tensor import materialize
from lightning_paral.checkpoint.manifest import FILE_NAME, Manifest
from lightning_paral.checkpoint.optimizer_state import OTHER_ENTRIES_KEY, to_int_keys
from lightning_paral.checkpoint.resolve import explain_read_errors
from lightning_paral.checkpoint.tree import CURRENT_KEY, is_state_key
from lightning_paral.checkpoint.weights import PACKAGE_STATE_KEY
from lightning_paral.errors import CheckpointError


def open_checkpoint(path: str | Path, *, weights_only: bool = True, manifest: Manifest | None = None) -> dict[str, Any]:
    """Return the checkpoint at `path` in Lightning's format, with `optimizer_states` keyed by int.

    Args:
        path: the path of a file or folder, or the URL of a folder.
        weights_only: `False` trusts the checkpoint and runs code in it.
        manifest: the manifest of the checkpoint; `None` for a checkpoint of another tool.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or it is damaged.
    """
    with explain_read_errors(path):
        checkpoint = _open(path, weights_only, manifest)
        if weights_only:
            _check_structure(path, checkpoint)
        return checkpoint


def _check_structure(path: str | Path, checkpoint: dict[str, Any]) -> None:
    """Raise a `CheckpointError` if `state_dict` or `optimizer_states` has the wrong type."""
    states = checkpoint.get("optimizer_states", [])
    fits = isinstance(checkpoint["state_dict"], Mapping) and isinstance(states, list)
    fits = fits and all(isinstance(name, str) for name in checkpoint["state_dict"])
    if not fits or not all(map(_is_state, states)):
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint: its state_dict or optimizer_states has the wrong type."
        )


def _is_state(state: Any) -> bool:
    """Return whether `state` has the structure of the state of an optimizer."""
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
                raise CheckpointError(f"{path} is not a checkpoint: it has no 'state_dict'.")
            return checkpoint
        if any(folder.path.glob("*/*mp_rank_00_model_states.pt")):
            raise CheckpointError(_of_deepspeed(folder.path))
    return _open_sharded(folder, path, weights_only, manifest)


def _of_deepspeed(path: Path) -> str:
    """Return the error about a folder of DeepSpeed, with the lines that convert it."""
    source, file, folder = (quote(f"{path.absolute()}{suffix}") for suffix in ("", "-fp32.ckpt", "-fp32"))
    code = (
        "import sys; from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict as "
        "convert; convert(*sys.argv[1:])"
    )
    return (
        f"{path} is a checkpoint of DeepSpeed, which only DeepSpeed reads. Convert it once, if you trust it: this runs "
        "code in it. If Lightning's deepspeed strategies saved it, the result is a ckpt_path for every strategy, with "
        f"CheckpointOptions(restore_optimizer=False):\npython -c '{code}' {source} {file}\nOtherwise, the result are "
        f"weights for load_state_dict:\npython {quote(str(path.absolute() / 'zero_to_fp32.py'))} {source} {folder}"
    )


def _open_sharded(folder: Folder, path: str | Path, weights_only: bool, manifest: Manifest | None) -> dict[str, Any]:
    names = manifest.names if manifest is not None else {}
    if folder.size(names.get(METADATA, METADATA)) is None:
        raise CheckpointError(f"{path} is not a checkpoint: it has no file {METADATA}.")
    checkpoint = read_meta(folder, names.get(META, META), weights_only)
    if PACKAGE_STATE_KEY in checkpoint and manifest is None:
        raise CheckpointError(f"The checkpoint is incomplete: {folder.name(FILE_NAME)} is missing.")
    if any(not isinstance(key, str) for key in checkpoint):
        raise CheckpointError(f"{folder.name(META)} is damaged: its keys are not strings.")
    tree = read_tree(folder, names.get(METADATA, METADATA), contiguous=manifest is not None, weights_only=weights_only)
    weights = tree.pop("state_dict", None)  # other tools call the weights "model"
    checkpoint["state_dict"] = tree.pop("model", {}) if weights is None else weights
    if CURRENT_KEY in tree:
        checkpoint[CURRENT_KEY] = tree.pop(CURRENT_KEY)
    numbers = sorted(int(key.removeprefix("optimizer_")) for key in tree if is_state_key(key))
    optimizers = [tree.pop(f"optimizer_{number}") for number in numbers]
    if manifest is not None:
        _fill(checkpoint, tree)
    if optimizers:
        others = checkpoint.pop(OTHER_ENTRIES_KEY, [{}] * len(optimizers))
        checkpoint["optimizer_states"] = [other | to_int_keys(s) for other, s in zip(others, optimizers, strict=True)]
    return checkpoint


def _fill(checkpoint: Any, tensors: Any) -> None:
    """Read `tensors`, which are sharded tensors of callbacks, into `checkpoint`, which has `None` in their places."""
    items = tensors.items() if isinstance(tensors, dict) else enumerate(tensors)
    for key, value in items:
        if isinstance(value, Tensor):
            checkpoint[key] = materialize(value)
        elif value is not None:
            _fill(checkpoint[key], value)
