"""Models of `transformers` in checkpoints: described when they are saved, and built again by `paral consolidate`."""

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_paral.checkpoint.optimizer_state import list_names
from lightning_paral.errors import CheckpointError, ConfigurationError
from lightning_paral.model.engine_attributes import class_without_engine

KEY = "hugging_face"
"""Key of the descriptions in the state of this package in a checkpoint."""


def describe_models(module: Module) -> list[dict[str, str]]:
    """Return descriptions of the outermost `PreTrainedModel`s in `module`: `prefix`, `config`, `generation_config`.

    `prefix` is that of the names of its weights, with the dot; the others are the texts of two JSON files.
    `transformers` is not imported here: unless the user has imported it, no such model exists.
    """
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    found: dict[str, dict[str, str]] = {}
    for name, model in module.named_modules():  # parents come first
        prefix = f"{name}." if name else ""
        if not isinstance(model, base) or any(prefix.startswith(outer) for outer in found):
            continue
        found[prefix] = {}
        with suppress(Exception):  # a custom config may raise any error, and that must not make the save fail
            config = json.loads(model.config.to_json_string())
            config["architectures"] = [class_without_engine(type(model)).__name__]
            described = {"prefix": prefix, "config": json.dumps(config)}
            if model.can_generate() and model.generation_config is not None:
                described["generation_config"] = model.generation_config.to_json_string()
            found[prefix] = described
    return [described for described in found.values() if described]


def without_wrappers(name: str) -> str:
    """Return the name of a weight without the prefixes that `torch.compile` adds to it."""
    return name.replace("_orig_mod.", "")


def build_model(described: list[dict[str, str]], config: Path | None, prefix: str | None) -> tuple[str, Any]:
    """Return the prefix of the names of a model's weights, and the `PreTrainedModel` itself, on the meta device.

    Args:
        described: what `describe_models` returned when the checkpoint was saved.
        config: the path of `config.json`, or of the folder that contains it; `None` takes it from `described`.
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
    if len(chosen) != 1 and (config is None or prefix is None):
        choices = ", ".join(f"--strip-prefix {model['prefix']}" for model in described)
        raise ConfigurationError(
            f"The checkpoint describes {len(described)} Hugging Face models, and one must be chosen: "
            f"{choices or 'none'}. For a model that it does not describe, pass the folder of its config and the prefix "
            "of its weights: --config FOLDER --strip-prefix PREFIX."
        )
    texts = chosen[0] if config is None else _read(config)
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
    return chosen[0]["prefix"] if prefix is None else prefix, model


def _read(path: Path) -> dict[str, str]:
    """Return the texts of `config.json` and, if there is one, `generation_config.json`."""
    folder = path if path.is_dir() else path.parent
    files = {"config": path / "config.json" if path.is_dir() else path}
    if (folder / "generation_config.json").is_file():
        files["generation_config"] = folder / "generation_config.json"
    try:
        texts = {key: file.read_text() for key, file in files.items()}
        if not all(isinstance(json.loads(text), dict) for text in texts.values()):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not the config of a model: {error}.") from error
    return texts


def fill(model: Any, weights: Mapping[str, Tensor]) -> None:
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
            f"them. {fault}Save frozen parameters as well, merge adapters before saving (merge_and_unload), pass "
            "another --config, or write only the weights: OUT.safetensors --strip-prefix PREFIX."
        )


def _equal(value: Tensor, given: Tensor) -> bool:
    return value.is_meta or value.data_ptr() == given.data_ptr() or torch.equal(value, given)
