"""Write a Hugging Face model in a checkpoint to a folder that `from_pretrained` can load."""

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_paral.checkpoint.consolidate import Progress, check_free_space
from lightning_paral.checkpoint.formats.hugging_face import (
    KEY,
    ExpectedWeights,
    PretrainedModel,
    expected_weights,
    with_dtype,
    without_wrappers,
)
from lightning_paral.checkpoint.formats.safetensors import Layout, Pairs, divide, pairs_of, write_shard
from lightning_paral.checkpoint.io.atomic import AtomicPath
from lightning_paral.checkpoint.state.optimizer import list_names
from lightning_paral.checkpoint.state.prefix import prefixes, without_prefix
from lightning_paral.checkpoint.state.weights import PACKAGE_STATE_KEY
from lightning_paral.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What to write to the folder."""

    pairs: Pairs
    """The weights."""
    config: str
    """The text of `config.json`."""
    generation_config: str | None
    """The text of `generation_config.json`; `None` writes no such file."""
    checked: bool
    """Whether the weights were compared with those that `transformers` expects for the config."""

    @property
    def nbytes(self) -> int:
        """Total size of the weights in bytes."""
        return sum(item.nbytes for item, _ in self.pairs)


def contents_of(
    checkpoint: Mapping[str, Any], *, config: Path | None, prefix: str | None, only_prefix: bool, cast: bool
) -> Contents:
    """Return what to write to the folder for a `PreTrainedModel` in `checkpoint`.

    Args:
        checkpoint: the checkpoint with the weights.
        config: the path of `config.json`, or of the folder that contains it; `None` takes the config from the
            checkpoint.
        prefix: the prefix of the names of the model's weights. Required if the checkpoint describes several models,
            or if `config` is given and the checkpoint does not describe exactly one.
        only_prefix: whether to drop weights without the prefix instead of raising an error.
        cast: whether the weights will be cast to another dtype.

    Raises:
        ConfigurationError: the model cannot be determined from the arguments and the checkpoint.
        CheckpointError: the weights do not match the config, so `from_pretrained` would not load them.
    """
    weights = checkpoint["state_dict"]
    state = checkpoint.get(PACKAGE_STATE_KEY)
    state = state if isinstance(state, Mapping) else {}
    recorded = [PretrainedModel.from_data(data) for data in state.get(KEY) or ()]
    if config is None:
        model = _model_from_checkpoint(recorded, weights, prefix)
        expected = expected_weights(model.config)
    else:
        model, expected = _model_from_config(config, recorded, weights, prefix)
    selected: dict[str, Any] = {}
    for name, value in without_prefix(weights, model.prefix, only=only_prefix).items():
        if selected.setdefault(without_wrappers(name), value) is not value:
            raise CheckpointError(f"Two weights would have the name {without_wrappers(name)}.")
    frozen = [name for name in state.get("frozen") or () if name.startswith(model.prefix) and name not in weights]
    if frozen:
        raise CheckpointError(
            "The checkpoint was saved without frozen parameters (save_frozen=False), so the model is incomplete. "
            + list_names("Missing", frozen)
        )
    pairs = _untie({name: value for name, value in selected.items() if name not in model.ignored}, model)
    if expected is not None:
        _check(pairs, model, expected)
    dtypes = [item.dtype for item, _ in pairs if item.dtype.is_floating_point]
    dtype = str(dtypes[0] if dtypes else torch.get_default_dtype()).removeprefix("torch.")
    return Contents(
        pairs=pairs,
        config=with_dtype(model.config, dtype, everywhere=cast),
        generation_config=model.generation_config,
        checked=expected is not None,
    )


def _model_from_checkpoint(
    recorded: list[PretrainedModel], weights: Mapping[str, Any], prefix: str | None
) -> PretrainedModel:
    """Return the model with the given prefix from the descriptions in the checkpoint."""
    if not recorded:
        raise ConfigurationError(
            "The checkpoint does not describe a Hugging Face model: the module did not contain one, or the checkpoint "
            "was not saved by a strategy of this package. Pass the config of the model: --config FOLDER_OR_FILE "
            "--strip-prefix PREFIX. The prefixes in the checkpoint, each with its number of weights: "
            f"{prefixes(weights) or 'none'}."
        )
    names = ", ".join(f"--strip-prefix {model.prefix}" for model in recorded)
    if prefix is None and len(recorded) > 1:
        raise ConfigurationError(f"The checkpoint contains {len(recorded)} Hugging Face models. Choose one: {names}.")
    found = [model for model in recorded if prefix is None or model.prefix == prefix]
    if not found:
        raise ConfigurationError(f"No Hugging Face model has the prefix {prefix!r}. Choose one of: {names}.")
    if found[0].obstacle is not None:
        raise CheckpointError(
            f"The Hugging Face model {found[0].prefix!r} cannot be written as its save_pretrained would write it: "
            f"{found[0].obstacle}."
        )
    return found[0]


def _model_from_config(
    path: Path, recorded: list[PretrainedModel], weights: Mapping[str, Any], prefix: str | None
) -> tuple[PretrainedModel, ExpectedWeights]:
    """Return the model that the config at `path` describes, and the weights that `transformers` expects for it."""
    if prefix is None and len(recorded) == 1:
        prefix = recorded[0].prefix
    if prefix is None:
        raise ConfigurationError(
            "--config also needs --strip-prefix PREFIX, which selects the weights of the model. The prefixes in the "
            f"checkpoint, each with its number of weights: {prefixes(weights) or 'none'}."
        )
    config = _read(path / "config.json" if path.is_dir() else path)
    generation_path = path / "generation_config.json"
    expected = expected_weights(config)
    if expected is None:
        raise ConfigurationError(
            f"The weights of the model in {path} cannot be determined: `transformers` is not installed, or does not "
            f"have the class named in 'architectures', {json.loads(config).get('architectures')}. Install it, or "
            "write only the weights: OUT.safetensors --strip-prefix PREFIX."
        )
    generation_config = expected.model.generation_config
    if path.is_dir() and generation_path.is_file():
        generation_config = _read(generation_path)
    return replace(expected.model, prefix=prefix, config=config, generation_config=generation_config), expected


def _read(path: Path) -> str:
    try:
        text = path.read_text()
        if isinstance(json.loads(text), dict):
            return text
        reason = "it is not a JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    raise ConfigurationError(f"{path} is not the config of a model: {reason}.")


def _untie(weights: dict[str, Any], model: PretrainedModel) -> Pairs:
    """Return the tensors to write. Write tied weights once if loading ties them again, otherwise under each name."""
    pairs: Pairs = []
    for item, tensor in pairs_of(weights):
        paths = [item.path, *item.aliases]
        kept = [path for path in paths if path[1] not in model.tied] or paths[:1]
        pairs += [(replace(item, path=path, aliases=[]), tensor) for path in kept]
    return pairs


def _check(pairs: Pairs, model: PretrainedModel, expected: ExpectedWeights) -> None:
    """Raise a `CheckpointError` unless names and shapes match `expected`.

    `from_pretrained` would initialize missing weights randomly.
    """
    shapes = {str(item.path[1]): item.shape for item, _ in pairs}
    set_by_loading = {*model.tied, *model.ignored, *expected.model.tied, *expected.model.ignored}
    missing = sorted(expected.shapes.keys() - shapes.keys() - set_by_loading)
    unexpected = sorted(shapes.keys() - expected.shapes.keys())
    mismatched = sorted(
        f"{name} (checkpoint {shape}, config {expected.shapes[name]})"
        for name, shape in shapes.items()
        if expected.shapes.get(name, shape) != shape
    )
    if missing or unexpected or mismatched:
        cls = " ".join(json.loads(model.config).get("architectures") or ["the model"])
        raise CheckpointError(
            f"The weights do not match {cls} with this config, so `from_pretrained` would not load them correctly. "
            + list_names("Missing in the checkpoint", missing)
            + list_names("Only in the checkpoint", unexpected)
            + list_names("Different shape", mismatched)
            + "Pass another --config, or write only the weights: OUT.safetensors --strip-prefix PREFIX."
        )


def write_folder(contents: Contents, out: Path, max_shard_bytes: int, progress: Progress) -> list[Path]:
    """Write the folder `out` atomically.

    Args:
        contents: what to write.
        out: the path of the folder, which must be empty or not exist.
        max_shard_bytes: the maximum size of a file, unless a single tensor is larger.
        progress: called after each write.

    Returns:
        list[Path]: the files written.

    Raises:
        CheckpointError: `out` exists and is not an empty folder, or the disk does not have enough free space.
    """
    check_free_space(out.parent, contents.nbytes)
    layout: Layout = divide(contents.pairs, "model", max_shard_bytes)
    texts = {
        "model.safetensors.index.json": layout.index,
        "config.json": contents.config,
        "generation_config.json": contents.generation_config,
    }
    with AtomicPath(out, folder=True) as draft:
        for name, shard in layout.files.items():
            write_shard(shard, draft.path / name, progress)
        for name, text in texts.items():
            if text is not None:
                _write(draft.path / name, text)
        _sync(draft.path)
        try:
            os.rename(draft.path, out)  # replaces an empty folder only
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise CheckpointError(
                    f"{out} was created while the model was being written, and is not replaced: {error}."
                ) from error
            raise
        _sync(out.parent)
    return [out / name for name in sorted([*layout.files, *(name for name, text in texts.items() if text is not None)])]


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
