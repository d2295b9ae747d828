"""Convert any checkpoint to one Lightning file, to safetensors, or to a Hugging Face folder."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lightning_paral.checkpoint.commit import AtomicPath, sync_folder
from lightning_paral.checkpoint.full import write_full
from lightning_paral.checkpoint.layout import full_chunk
from lightning_paral.checkpoint.lazy_tensor import LazyTensor, materialize
from lightning_paral.checkpoint.load import load, read_current, read_manifest
from lightning_paral.checkpoint.manifest import Manifest
from lightning_paral.checkpoint.shards import NO_SHARD, LocalShard
from lightning_paral.checkpoint.tree import (
    CURRENT_KEY,
    PACKAGE_STATE_KEY,
    WEIGHT_KEYS,
    SavedTensor,
    tensors_in,
    view_key,
)
from lightning_paral.checkpoint.weights import MODELS_KEY
from lightning_paral.distributed.exchange import RankGroup, explain
from lightning_paral.errors import CheckpointError, ConfigurationError, ParalError
from lightning_paral.text import list_names

_TRAINING_KEYS = ("optimizer_states", "lr_schedulers", "callbacks", CURRENT_KEY, "averaging_state")

_log = logging.getLogger(__name__)


def convert(
    checkpoint: str,
    out: str,
    *,
    weights_only: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
    strip_prefix: str | None = None,
    only_prefix: bool = False,
    hugging_face: bool = False,
    trust: bool = False,
) -> list[Path]:
    """Convert a checkpoint, atomically, and show the progress. The name of `out` chooses the format.

    One tensor at a time is in memory. Safetensors are written by `huggingface_hub`, and Hugging Face folders by the
    model's own `save_pretrained`, from a temporary file that is mapped into memory.

    Args:
        checkpoint: the path or URL of a checkpoint of this package or Lightning.
        out: a local path: `.ckpt` for a Lightning file, `.safetensors` for weights; a folder with `hugging_face`.
        weights_only: whether to leave out optimizers, schedulers and callbacks.
        dtype: the dtype of the weights; `None` keeps it.
        max_shard_bytes: the maximum size of a file in a Hugging Face folder, unless a single tensor is larger; `None`
            means 5 GB.
        strip_prefix: the prefix to remove from the names of weights in safetensors.
        only_prefix: whether to leave out weights whose names lack the prefix.
        hugging_face: whether to write a `PreTrainedModel` as a folder that `from_pretrained` loads.
        trust: whether to create objects of any type, which may run code in the checkpoint.

    Returns:
        list[Path]: the files written.

    Raises:
        ConfigurationError: the arguments contradict each other or the checkpoint, or `out` must not be replaced.
        CheckpointError: the checkpoint cannot be read, or the output cannot be written.
    """
    target = Path(out)
    _check_options(out, target, strip_prefix, only_prefix, hugging_face, max_shard_bytes)

    def read(path: str | Path) -> tuple[dict[str, Any], Manifest | None]:
        is_same = target.exists() and Path(path).exists() and target.samefile(path)
        if is_same or target.resolve().is_relative_to(Path(path).resolve()):
            raise ConfigurationError(
                f"{target} is the checkpoint {path}, or inside it, and this must not be modified. Write elsewhere."
            )
        return load(path, RankGroup(), weights_only=not trust), read_manifest(path)

    found, manifest = read_current(checkpoint, RankGroup(), read)
    about = {
        "form": "full",
        "strategy": manifest.strategy if manifest else "unknown",
        "world_size": manifest.world_size if manifest else 0,
        "epoch": int(found.get("epoch", 0)),
        "global_step": int(found.get("global_step", 0)),
    }
    prefix = strip_prefix if strip_prefix is None else f"{strip_prefix.rstrip('.')}.".removeprefix(".")
    model = None
    if hugging_face:
        described = found.get(PACKAGE_STATE_KEY, {}).get(MODELS_KEY, [])
        prefix, model = _build_model(described, prefix)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == ".ckpt" and model is None:
            kept = {key: value for key, value in found.items() if not (weights_only and key in _TRAINING_KEYS)}
            with AtomicPath(target, folder=False) as draft:
                _write_file(kept, draft.path, about, dtype=dtype)
                draft.commit()
            return [target]
        weights = _select(found["state_dict"], prefix or "", only_prefix)
        if model is None:
            return _write_safetensors(weights, target, about, dtype)
        return _write_model(weights, model, target, about, dtype, max_shard_bytes)
    except ParalError:
        raise
    except Exception as error:
        raise CheckpointError(f"{target} could not be written, and nothing of it was kept: {explain(error)}") from error


def _check_options(
    given: str,
    out: Path,
    strip_prefix: str | None,
    only_prefix: bool,
    hugging_face: bool,
    max_shard_bytes: int | None,
) -> None:
    """Raise a `ConfigurationError` if options contradict each other or the output."""
    is_file = out.suffix in (".ckpt", ".safetensors")
    faults = {
        f"{given} is a URL. Write to a local path, and copy the result to the URL.": "://" in given,
        f"--hugging-face writes a folder, but {out} is the name of a file.": hugging_face and is_file,
        f"{out} exists. Write to a new folder.": hugging_face and os.path.lexists(out),
        f"{out} ends in neither .ckpt nor .safetensors. A folder needs --hugging-face.": not (hugging_face or is_file),
        f"{out} is a folder. Write to a file: {out}/NAME{out.suffix}, or remove the folder first.": (
            is_file and os.path.isdir(out)  # Path.is_dir raises PermissionError where this returns False
        ),
        "--max-shard-size needs --hugging-face: other outputs are one file.": (
            max_shard_bytes is not None and not hugging_face
        ),
        "--strip-prefix needs safetensors: a Lightning file keeps the names of the module.": (
            strip_prefix is not None and out.suffix == ".ckpt"
        ),
        "--only-prefix needs --strip-prefix.": only_prefix and strip_prefix is None and not hugging_face,
    }
    for fault, is_given in faults.items():
        if is_given:
            raise ConfigurationError(fault)


def _select(weights: Mapping[str, Any], prefix: str, only: bool) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, without it.

    Raises:
        ConfigurationError: no name begins with the prefix, or some names do not and `only` is `False`.
    """
    of_prefix = {name: value for name, value in weights.items() if name.startswith(prefix)}
    others = [name for name in weights if name not in of_prefix]
    if not of_prefix:
        roots = sorted({name.split(".")[0] for name in weights})
        raise ConfigurationError(
            f"No weight's name begins with {prefix!r}. " + list_names("They begin with", roots) + "Choose another."
        )
    if others and not only:
        raise ConfigurationError(
            f"{len(others)} of {len(weights)} names do not begin with {prefix!r}, and would be lost. "
            + list_names("They are", others)
            + "Pass --only-prefix to leave them out."
        )
    left_out = [name for name, value in of_prefix.items() if not isinstance(value, Tensor)]
    if left_out:
        _log.warning("Left out, because safetensors files hold only tensors: %s.", ", ".join(left_out))
    return {name.removeprefix(prefix): value for name, value in of_prefix.items() if isinstance(value, Tensor)}


def _write_safetensors(
    weights: dict[str, Tensor], out: Path, about: dict[str, Any], dtype: torch.dtype | None
) -> list[Path]:
    """Write the file `out`, in which tied weights are stored once."""
    try:
        from huggingface_hub import save_torch_state_dict
    except ImportError as error:
        raise ConfigurationError(
            "Writing safetensors needs two libraries: pip install safetensors huggingface_hub."
        ) from error
    with AtomicPath(out.with_name(f"{out.name}.parts"), folder=True) as draft:
        mapped = _mapped(weights, draft.path, about, dtype)
        name = "model{suffix}.safetensors"
        save_torch_state_dict(mapped, draft.path, filename_pattern=name, max_shard_size=sys.maxsize)
        _flush(draft.path)
        os.replace(draft.path / name.format(suffix=""), out)
        sync_folder(out.parent)
    return [out]


def _write_model(
    weights: dict[str, Tensor],
    model: Any,
    out: Path,
    about: dict[str, Any],
    dtype: torch.dtype | None,
    max_shard_bytes: int | None,
) -> list[Path]:
    """Write the folder `out` with the `PreTrainedModel` on the meta device and its weights."""
    weights = {_without_wrappers(name): value for name, value in weights.items()}
    _fill(model, {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in weights.items()})
    with AtomicPath(out, folder=True) as draft:
        _fill(model, _mapped(weights, draft.path, about, dtype))
        model.save_pretrained(draft.path, max_shard_size=max_shard_bytes or 5 * 10**9)
        names = _flush(draft.path)
        draft.commit()
    return [out / name for name in names]


def _without_wrappers(name: str) -> str:
    """Return the name of a weight without the prefixes that `torch.compile` adds to it."""
    return name.replace("_orig_mod.", "")


def _build_model(described: list[dict[str, str]], prefix: str | None) -> tuple[str, Any]:
    """Return the prefix of the names of a model's weights, and the `PreTrainedModel` itself, on the meta device.

    Args:
        described: what `describe_models` returned when the checkpoint was saved.
        prefix: the prefix. Required if the checkpoint does not describe exactly one model.

    Raises:
        ConfigurationError: the model cannot be determined, or its class is not in `transformers`.
        CheckpointError: the model cannot be built from its config.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError("--hugging-face needs a library: pip install transformers.") from error
    chosen = [model for model in described if prefix in (None, model["prefix"])]
    if len(chosen) != 1:
        choices = ", ".join(f"--strip-prefix {model['prefix']}" for model in described)
        raise ConfigurationError(
            f"The checkpoint describes {len(described)} Hugging Face models, and one must be chosen: "
            f"{choices or 'none'}. For one that it does not describe, write FOLDER/model.safetensors --strip-prefix "
            "PREFIX, and save the model's config in the same folder."
        )
    texts = chosen[0]
    content = json.loads(texts["config"])
    name = " ".join(map(str, content.get("architectures") or ["no class"]))
    cls: Any = getattr(transformers, name, None)
    if getattr(cls, "config_class", None) is None:
        raise ConfigurationError(
            f"The config of the model names {name}, which `transformers` does not have. Write only the weights: "
            "OUT.safetensors --strip-prefix PREFIX."
        )
    try:
        with torch.device("meta"):
            model = cls(cls.config_class.from_dict(content))
        if "generation_config" in texts:
            model.generation_config = transformers.GenerationConfig.from_dict(json.loads(texts["generation_config"]))
    except Exception as error:
        raise CheckpointError(f"{name} could not be built from its config: {error}") from error
    return texts["prefix"], model


def _fill(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Make these weights, without copying them, those of a `PreTrainedModel` on the meta device.

    Raises:
        CheckpointError: the weights are not exactly those of the model, so `from_pretrained` would load other values.
    """
    try:
        unexpected = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
        fault = list_names("Only in the checkpoint", sorted(unexpected))
    except RuntimeError as error:
        fault = f"{error} "
    model.tie_weights()
    own = model.state_dict(keep_vars=True)
    given = {id(own[name]) for name in weights if name in own}
    fault += list_names("Missing in the checkpoint", [name for name, value in own.items() if id(value) not in given])
    tied = [name for name in weights if name in own and not _equal(own[name], weights[name])]
    fault += list_names("Tied by the config, but different in the checkpoint", tied)
    if fault:
        raise CheckpointError(
            f"The weights do not match {type(model).__name__} with this config, so `from_pretrained` would not load "
            f"them. {fault}Save frozen parameters as well, merge adapters before saving (merge_and_unload), or write "
            "only the weights: OUT.safetensors --strip-prefix PREFIX."
        )


def _equal(value: Tensor, given: Tensor) -> bool:
    return value.is_meta or value.data_ptr() == given.data_ptr() or torch.equal(value, given)


def _mapped(
    weights: dict[str, Tensor], folder: Path, about: dict[str, Any], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return weights as tensors of `dtype` that are mapped from a file in `folder`, which is then unlinked."""
    path = folder / "weights"
    _write_file({"state_dict": weights}, path, about, dtype=dtype, copies=2)
    found: dict[str, Tensor] = torch.load(path, mmap=True, weights_only=True)["state_dict"]
    path.unlink()
    return found


def _flush(folder: Path) -> list[str]:
    """Wait until the files in `folder` are on disk, and return their names, sorted."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith(".nfs"))  # unlinked, but still mapped
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    return names


def _write_file(
    checkpoint: dict[str, Any], path: Path, about: dict[str, Any], *, dtype: torch.dtype | None = None, copies: int = 1
) -> None:
    """Write `checkpoint` to the new file `path` as an ordinary Lightning file with a manifest, and show the progress.

    At any time, one tensor is in memory. Tensors outside of weights and optimizer states are already there.

    Args:
        checkpoint: a checkpoint in Lightning's format, as `load` returns it.
        path: the path of the file.
        about: the fields of the manifest except `files`.
        dtype: the dtype of floating-point weights in the file; `None` keeps their dtypes.
        copies: how many times as much free space as for the file is needed.

    Raises:
        CheckpointError: the disk does not have enough free space, or a tensor could not be read or written.
    """
    with tqdm(unit="B", unit_scale=True, desc="tensors") as bar:
        tensors = _tensors(checkpoint, dtype, bar.update)
        bar.reset(total=sum(tensor.nbytes for tensor in tensors))
        needed_bytes, free_bytes = copies * bar.total, shutil.disk_usage(path.parent).free
        if free_bytes < needed_bytes:
            raise CheckpointError(
                f"The output needs {needed_bytes / 1e9:.2f} GB, but only {free_bytes / 1e9:.2f} GB are free in "
                f"{path.parent}. Free some space, or write elsewhere."
            )
        write_full(checkpoint, tensors, path, RankGroup(), about, "Writing the output")


def _tensors(
    checkpoint: dict[str, Any], dtype: torch.dtype | None, progress: Callable[[int], object]
) -> list[SavedTensor]:
    """Return each tensor of weights and optimizer states. It is read when it is written. Tied tensors occur once."""
    found: dict[Any, SavedTensor] = {}
    for key in (*WEIGHT_KEYS, "optimizer_states"):
        for path, tensor in tensors_in(checkpoint.get(key), (key,)):
            cast = dtype if key == "state_dict" and tensor.is_floating_point() else None
            saved = SavedTensor((path,), tuple(tensor.shape), cast or tensor.dtype, NO_SHARD)
            if tensor.numel():
                saved.shard = LocalShard((full_chunk(tensor.shape),), partial(_read, tensor, progress, saved.nbytes))
            first = found.setdefault((_location(tensor), saved.dtype), saved)
            if first is not saved:
                first.paths += (path,)
    return list(found.values())


def _read(tensor: Tensor, progress: Callable[[int], object], nbytes: int) -> Tensor:
    progress(nbytes)
    return materialize(tensor)


def _location(tensor: Tensor) -> Any:
    """Return a key that is equal for tied tensors, both for `LazyTensor` and for tensors mapped from a file."""
    if isinstance(tensor, LazyTensor):
        locations = [stored.location for stored in tensor.chunks]
        return tuple(locations) if locations and None not in locations else id(tensor)
    return view_key(tensor)
