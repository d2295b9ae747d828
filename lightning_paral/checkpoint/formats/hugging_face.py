"""Describe the `transformers` models of a module in its checkpoints, so that `paral consolidate` can export them."""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_paral.errors import CheckpointError

KEY = "hugging_face"
"""Key of the descriptions in the state of this package in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class PretrainedModel:
    """A description of a `PreTrainedModel` inside a module, as plain data."""

    prefix: str
    """Prefix of the names of its weights in the `state_dict` of the module, including the dot."""
    config: str
    """The text of `config.json`."""
    generation_config: str | None = None
    """The text of `generation_config.json`, for generative models."""
    tied: list[str] = field(default_factory=list)
    """Names, without the prefix, of weights that `save_pretrained` drops because loading ties them to others."""
    ignored: list[str] = field(default_factory=list)
    """Names, without the prefix, of weights that `save_pretrained` drops because loading initializes them."""
    obstacle: str | None = None
    """Why the model cannot be written as `save_pretrained` would write it; `None` if it can."""

    @staticmethod
    def from_data(data: Any) -> "PretrainedModel":
        """Return the description that a checkpoint stores as a dict.

        Raises:
            CheckpointError: `data` is not such a dict.
        """
        types = {
            "prefix": str,
            "config": str,
            "generation_config": str | None,
            "tied": list,
            "ignored": list,
            "obstacle": str | None,
        }
        if not isinstance(data, Mapping) or any(not isinstance(data.get(key), cls) for key, cls in types.items()):
            raise CheckpointError(
                "The description of the Hugging Face model in the checkpoint is damaged. Pass its config with --config."
            )
        return PretrainedModel(**{key: data[key] for key in types})


def describe_models(module: Module) -> list[dict[str, Any]]:
    """Return the descriptions of the outermost `PreTrainedModel`s in `module`, as dicts.

    `transformers` is not imported here: unless the user has imported it, no such model exists.
    """
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return []
    return [asdict(_describe(name, part)) for name, part in _outermost(module, base)]


def _outermost(module: Module, base: type) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each instance of `base` that is not inside another instance."""
    found: list[str] = []
    for name, part in module.named_modules():  # parents come first
        if isinstance(part, base) and not any(name.startswith(prefix) for prefix in found):
            found.append(f"{name}." if name else "")
            yield name, part


def _describe(name: str, model: Any) -> PretrainedModel:
    prefix = f"{name}." if name else ""
    try:
        config = json.loads(model.config.to_json_string(use_diff=True))
        config["architectures"] = [_class_of(model).__name__]
        generation_config = None
        if model.can_generate() and getattr(model, "generation_config", None) is not None:
            generation = json.loads(model.generation_config.to_json_string(use_diff=True))
            generation.pop("compile_config", None)
            generation_config = _text(generation)
        return PretrainedModel(
            prefix=prefix,
            config=_text(config),
            generation_config=generation_config,
            tied=sorted(_tied_to_others(model)),
            ignored=sorted(getattr(model, "_keys_to_ignore_on_save", None) or ()),
            obstacle=_obstacle(model),
        )
    except Exception as error:  # a custom config may raise any error, and that must not make the save fail
        return PretrainedModel(prefix=prefix, config="{}", obstacle=f"its config could not be read: {error!r}")


def _class_of(model: Module) -> type:
    """Return the class that `model` had before `fully_shard` replaced it by a subclass."""
    cls = type(model)
    return cls.__bases__[1] if isinstance(model, FSDPModule) and cls.__bases__[0] is FSDPModule else cls


def _tied_to_others(model: Any) -> Iterator[str]:
    """Yield the names that `save_pretrained` drops: those that the model declares as tied, but never all of a group."""
    declared = getattr(model, "all_tied_weights_keys", None)  # {target: source}, since transformers 5
    patterns = list(declared if declared is not None else getattr(model, "_tied_weights_keys", None) or ())
    groups: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(value), []).append(without_wrappers(name))
    for names in groups.values():
        matching = [name for name in sorted(names) if any(re.search(pattern, name) for pattern in patterns)]
        yield from matching[: len(names) - 1]


def _obstacle(model: Any) -> str | None:
    if any(type(part).__module__.split(".")[0] == "peft" for part in model.modules()):
        return "it has PEFT adapters. Merge them into the model before saving (merge_and_unload)"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        return f"it is quantized ({type(quantizer).__name__})"
    return None


def without_wrappers(name: str) -> str:
    """Return the name of a weight without the prefixes that `torch.compile` adds to it."""
    return name.replace("_orig_mod.", "")


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def with_dtype(config: str, dtype: str, everywhere: bool) -> str:
    """Return the text of `config.json` with its dtype set to `dtype`, to which `from_pretrained` casts the weights.

    Args:
        config: the original text.
        dtype: the name of the dtype of the weights, such as `"bfloat16"`.
        everywhere: whether to set it also in the configs of the parts of a composite model, such as `text_config`.
    """
    content = json.loads(config)
    content["torch_dtype" if "torch_dtype" in content and "dtype" not in content else "dtype"] = dtype
    for part in content.values() if everywhere else ():
        if isinstance(part, dict) and "model_type" in part:
            part.update({key: dtype for key in ("dtype", "torch_dtype") if part.get(key)})
    return _text(content)


@dataclass(frozen=True, kw_only=True)
class ExpectedWeights:
    """The weights that `from_pretrained` expects for a `config.json`."""

    shapes: dict[str, tuple[int, ...]]
    """The shape of each weight by its name."""
    model: PretrainedModel
    """The description of the model."""


def expected_weights(config: str) -> ExpectedWeights | None:
    """Return the weights of the model that `config` describes, which is built on the meta device.

    Returns:
        ExpectedWeights | None: `None` if `transformers` is not installed, or does not have the class of the model.

    Raises:
        CheckpointError: the model cannot be built.
    """
    try:
        import transformers
    except ImportError:
        return None
    import torch

    content = json.loads(config)
    architectures = content.get("architectures") or []
    cls: Any = getattr(transformers, architectures[0], None) if len(architectures) == 1 else None
    if getattr(cls, "config_class", None) is None:
        return None
    try:
        with torch.device("meta"):
            model = cls(cls.config_class.from_dict(content))
    except Exception as error:
        raise CheckpointError(f"{architectures[0]} could not be built from its config: {error}") from error
    return ExpectedWeights(
        shapes={name: tuple(value.shape) for name, value in model.state_dict().items()}, model=_describe("", model)
    )
