"""Write the folder that `from_pretrained` loads a model from, given a checkpoint."""

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
    """The content of the folder."""

    pairs: Pairs
    config: str
    generation_config: str | None
    checked: bool
    """Whether the weights were compared with those that `transformers` expects for the config."""

    @property
    def nbytes(self) -> int:
        """Size of all weights in bytes."""
        return sum(item.nbytes for item, _ in self.pairs)


def contents_of(
    checkpoint: Mapping[str, Any], *, config: Path | None, prefix: str | None, only_prefix: bool, cast: bool
) -> Contents:
    """Return the content of the folder for a `PreTrainedModel` in `checkpoint`.

    Args:
        checkpoint: has the weights to be written.
        config: the `config.json` of the model, or its folder; `None` takes the config from the checkpoint.
        prefix: prefix of the weights of the model; required if there are several models, or if `config` is given.
        only_prefix: drop weights without the prefix instead of raising an error.
        cast: whether the weights are to be written in another dtype.

    Raises:
        ConfigurationError: the model cannot be determined from the arguments and the checkpoint.
        CheckpointError: the weights do not match the config, so `from_pretrained` would not load them.
    """
    weights = checkpoint["state_dict"]
    own = checkpoint.get(PACKAGE_STATE_KEY)
    own = own if isinstance(own, Mapping) else {}
    recorded = [PretrainedModel.from_data(data) for data in own.get(KEY) or ()]
    if config is None:
        model = _model_from_checkpoint(recorded, weights, prefix)
        expected = expected_weights(model.config)
    else:
        model, expected = _model_from_config(config, recorded, weights, prefix)
    selected: dict[str, Any] = {}
    for name, value in without_prefix(weights, model.prefix, only=only_prefix).items():
        if selected.setdefault(without_wrappers(name), value) is not value:
            raise CheckpointError(f"Two weights would have the name {without_wrappers(name)}.")
    frozen = [name for name in own.get("frozen") or () if name.startswith(model.prefix) and name not in weights]
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
    """Return the model that the checkpoint describes."""
    if not recorded:
        raise ConfigurationError(
            "The checkpoint does not say what Hugging Face model it holds: there was none in the module, or it was not "
            "saved by a strategy of this package. Give its config: --config FOLDER_OR_FILE --strip-prefix PREFIX. The "
            f"prefixes there are, and how many names have each: {prefixes(weights) or 'none'}."
        )
    names = ", ".join(f"--strip-prefix {model.prefix}" for model in recorded)
    if prefix is None and len(recorded) > 1:
        raise ConfigurationError(f"The checkpoint holds {len(recorded)} Hugging Face models. Choose one: {names}.")
    found = [model for model in recorded if prefix is None or model.prefix == prefix]
    if not found:
        raise ConfigurationError(f"No Hugging Face model has the prefix {prefix!r}. What there is: {names}.")
    if found[0].obstacle is not None:
        raise CheckpointError(
            f"The Hugging Face model {found[0].prefix!r} cannot be written as its save_pretrained would: "
            f"{found[0].obstacle}."
        )
    return found[0]


def _model_from_config(
    path: Path, recorded: list[PretrainedModel], weights: Mapping[str, Any], prefix: str | None
) -> tuple[PretrainedModel, ExpectedWeights]:
    """Return the model whose config the user has given."""
    if prefix is None and len(recorded) == 1:
        prefix = recorded[0].prefix
    if prefix is None:
        raise ConfigurationError(
            "With --config say which weights are the model's: --strip-prefix PREFIX. The prefixes there are, and how "
            f"many names have each: {prefixes(weights) or 'none'}."
        )
    config = _read(path / "config.json" if path.is_dir() else path)
    beside = path / "generation_config.json"
    expected = expected_weights(config)
    if expected is None:
        raise ConfigurationError(
            f"The weights of the model of {path} cannot be determined: `transformers` is not installed, or has no "
            f"class of the name in its 'architectures', {json.loads(config).get('architectures')}. Install it, or "
            "write the weights alone: OUT.safetensors --strip-prefix PREFIX."
        )
    generation_config = _read(beside) if path.is_dir() and beside.is_file() else expected.model.generation_config
    return replace(expected.model, prefix=prefix, config=config, generation_config=generation_config), expected


def _read(path: Path) -> str:
    try:
        text = path.read_text()
        if isinstance(json.loads(text), dict):
            return text
        reason = "it is no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    raise ConfigurationError(f"{path} is not a model's config: {reason}.")


def _untie(weights: dict[str, Any], model: PretrainedModel) -> Pairs:
    """Return the tensors to be written: of weights that loading ties again one, of other tied weights each."""
    pairs: Pairs = []
    for item, tensor in pairs_of(weights):
        paths = [item.path, *item.aliases]
        kept = [path for path in paths if path[1] not in model.tied] or paths[:1]
        pairs += [(replace(item, path=path, aliases=[]), tensor) for path in kept]
    return pairs


def _check(pairs: Pairs, model: PretrainedModel, expected: ExpectedWeights) -> None:
    """Raise unless names and shapes are those that loading expects, which initializes missing weights at random."""
    shapes = {str(item.path[1]): item.shape for item, _ in pairs}
    made = {*model.tied, *model.ignored, *expected.model.tied, *expected.model.ignored}
    missing = sorted(expected.shapes.keys() - shapes.keys() - made)
    unexpected = sorted(shapes.keys() - expected.shapes.keys())
    others = sorted(
        f"{name} (checkpoint {shape}, config {expected.shapes[name]})"
        for name, shape in shapes.items()
        if expected.shapes.get(name, shape) != shape
    )
    if missing or unexpected or others:
        kind = " ".join(json.loads(model.config).get("architectures") or ["model"])
        raise CheckpointError(
            f"The weights are not those of a {kind} of this config, and `from_pretrained` would not load them as they "
            "are. "
            + list_names("Missing in the checkpoint", missing)
            + list_names("Only in the checkpoint", unexpected)
            + list_names("Of another shape", others)
            + "Give another --config, or write the weights alone: OUT.safetensors --strip-prefix PREFIX."
        )


def write_folder(contents: Contents, out: Path, max_shard_bytes: int, progress: Progress) -> list[Path]:
    """Write the folder `out` atomically, and return its files.

    Raises:
        CheckpointError: `out` exists, and is not an empty folder.
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
                raise CheckpointError(f"{out} was created meanwhile, and is not replaced: {error}.") from error
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
