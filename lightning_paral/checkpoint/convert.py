"""Convert any checkpoint to one Lightning file, to safetensors, or to a Hugging Face folder."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from lightning_paral.checkpoint.consolidate import Cast, Progress, check_outside, select, size_of, write_file
from lightning_paral.checkpoint.formats.hugging_face_folder import contents_of, write_folder
from lightning_paral.checkpoint.formats.safetensors import write_safetensors
from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.manifest import Manifest
from lightning_paral.checkpoint.resolve import read_current, read_manifest
from lightning_paral.checkpoint.state.prefix import as_prefix, without_prefix
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.errors import CheckpointError, ConfigurationError

T = TypeVar("T")

_log = logging.getLogger(__name__)


def convert(
    checkpoint: str,
    out: str,
    *,
    weights_only: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    strip_prefix: str | None = None,
    only_prefix: bool = False,
    hugging_face: bool = False,
    config: str | None = None,
    trust: bool = False,
) -> list[Path]:
    """Convert a checkpoint in constant memory, atomically, and show the progress. The name of `out` chooses the format.

    Args:
        checkpoint: the path or URL of a checkpoint of this package, Lightning or DeepSpeed.
        out: a local path: `.ckpt` for a Lightning file, `.safetensors` for weights; a folder with `hugging_face`.
        weights_only: whether to leave out optimizers, schedulers and callbacks.
        dtype: the dtype of the weights; `None` keeps it.
        max_shard_bytes: the maximum size of a safetensors file, unless a single tensor is larger.
        strip_prefix: the prefix to remove from the names of weights in safetensors.
        only_prefix: whether to leave out weights whose names lack the prefix.
        hugging_face: whether to write a `PreTrainedModel` as a folder that `from_pretrained` loads.
        config: the config of that model, or its folder; `None` takes it from the checkpoint.
        trust: whether to create objects of any type, which may run code in the checkpoint.

    Returns:
        list[Path]: the files written.

    Raises:
        ConfigurationError: the arguments contradict each other or the checkpoint, or `out` must not be replaced.
        CheckpointError: the checkpoint cannot be read, or the output cannot be written.
    """
    target = Path(out)
    fault = _fault_of_target(out, target, hugging_face) or _fault_of_options(
        target, strip_prefix, only_prefix, hugging_face, config
    )
    if fault:
        raise ConfigurationError(fault)

    def read(path: str | Path) -> tuple[dict[str, Any], Manifest | None]:
        if target.exists() and Path(path).exists() and target.samefile(path):
            raise ConfigurationError(f"{target} is the checkpoint that is read. Write to a different path.")
        check_outside(target, path)
        return load(path, RankGroup(), weights_only=not trust), read_manifest(path)

    found, manifest = read_current(checkpoint, RankGroup(), read)
    is_file = not hugging_face and target.suffix == ".ckpt"
    kept = select(found, weights_only=weights_only or not is_file, dtype=dtype)
    prefix = None if strip_prefix is None else as_prefix(strip_prefix)
    if is_file:
        about = {
            "form": "full",
            "strategy": manifest.strategy if manifest else "unknown",
            "world_size": manifest.world_size if manifest else 0,
            "epoch": int(kept.get("epoch", 0)),
            "global_step": int(kept.get("global_step", 0)),
        }
        _write(target, size_of(kept), lambda progress: write_file(kept, target, about, progress))
        return [target]
    weights = kept["state_dict"]
    if hugging_face:
        path = None if config is None else Path(config)
        contents = contents_of(kept, config=path, prefix=prefix, only_prefix=only_prefix, cast=dtype is not None)
        if not contents.checked:
            _log.warning(
                "The names of the weights were not checked: `transformers` is not installed, or does not have the "
                "model's class."
            )
        _warn_of_omitted(weights)
        return _write(
            target, contents.nbytes, lambda progress: write_folder(contents, target, max_shard_bytes, progress)
        )
    if prefix is not None:
        weights = without_prefix(weights, prefix, only=only_prefix)
    _warn_of_omitted(weights)
    nbytes = size_of({"state_dict": weights})
    return _write(target, nbytes, lambda progress: write_safetensors(weights, target, max_shard_bytes, progress))


def _fault_of_target(given: str, out: Path, hugging_face: bool) -> str:
    """Return why the output cannot be written to this path; an empty string if it can."""
    if "://" in given:
        return f"{given} is a URL. Write to a local path, and copy the result to the URL."
    if hugging_face:
        if out.suffix in (".ckpt", ".safetensors"):
            return f"--hugging-face writes a folder, but {out} is the name of a file."
        if os.path.lexists(out) and not _is_empty_folder(out):
            return f"{out} exists and is not an empty folder. Write to a new folder."
    elif out.suffix not in (".ckpt", ".safetensors"):
        return f"{out} ends in neither .ckpt nor .safetensors. A folder needs --hugging-face."
    elif os.path.isdir(out):  # Path.is_dir raises PermissionError where this returns False
        return f"{out} is a folder. Write to a file: {out}/NAME.ckpt, or remove the folder first."
    return ""


def _fault_of_options(
    out: Path, strip_prefix: str | None, only_prefix: bool, hugging_face: bool, config: str | None
) -> str:
    """Return which options contradict each other or the output; an empty string if none do."""
    if hugging_face:
        return ""
    if config is not None:
        return "--config needs --hugging-face."
    if strip_prefix is not None and out.suffix == ".ckpt":
        return "--strip-prefix needs safetensors: a Lightning file keeps the names of the module."
    if only_prefix and strip_prefix is None:
        return "--only-prefix needs --strip-prefix."
    return ""


def _is_empty_folder(path: Path) -> bool:
    with suppress(OSError):
        return not path.is_symlink() and not os.listdir(path)
    return False


def _warn_of_omitted(weights: dict[str, Any]) -> None:
    names = [name for name, value in weights.items() if not isinstance(value, torch.Tensor | Cast)]
    if names:
        _log.warning("Left out, because safetensors files hold only tensors: %s.", ", ".join(names))


def _write(out: Path, total_bytes: int, write: Callable[[Progress], T]) -> T:
    """Call `write` with a function that shows the progress.

    Raises:
        CheckpointError: the system reports an error.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tqdm(total=total_bytes, unit="B", unit_scale=True, desc=out.name) as bar:
            return write(bar.update)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error}. No part of it was kept.") from error
