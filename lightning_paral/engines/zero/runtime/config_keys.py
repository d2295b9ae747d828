"""Check the keys of a DeepSpeed configuration against DeepSpeed's source, without importing DeepSpeed.

When DeepSpeed is imported, it chooses its accelerator for the rest of the process.
"""

import ast
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lightning_paral.compat.deepspeed.runtime import removed_options
from lightning_paral.errors import ConfigurationError
from lightning_paral.suggestions import did_you_mean, nearest_names

_MODELS = {
    "zero_optimization": "DeepSpeedZeroConfig",
    "fp16": "DeepSpeedFP16Config",
    "bf16": "DeepSpeedBF16Config",
    "bfloat16": "DeepSpeedBF16Config",
    "comms_logger": "CommsLoggerConfig",
    "tensorboard": "TensorBoardConfig",
    "wandb": "WandbConfig",
    "csv_monitor": "CSVConfig",
    "comet": "CometConfig",
}
"""Maps each section that a pydantic model describes to the name of that model."""
_FLAT = ("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler", "torch_autocast")
"""Sections whose keys all occur as strings in the source. Other sections may have keys that the user chooses."""
_SOURCES = ("config.py", "constants.py", "precision_config.py", "*_config.py", "torch_autocast.py")
_WORD = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class _KnownNames:
    words: frozenset[str]
    """All names that occur in the source as a string or as a field."""
    removed: frozenset[str]
    """Names that earlier versions of DeepSpeed knew, and that the installed one rejects."""
    models: Mapping[str, Mapping[str, str | None]]
    """The fields of each model and their aliases. A field that is a section maps to its own model, others to `None`."""


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` for a key that DeepSpeed does not know. The message suggests the nearest known keys.

    DeepSpeed itself ignores an unknown key at the top level, and raises on every rank for one in a section.
    """
    known = _read_known_names()
    if known is None:
        return
    in_zero = known.models["DeepSpeedZeroConfig"]
    for key, value in config.items():
        if not isinstance(key, str) or key.startswith("_"):  # used for comments, which JSON lacks
            continue
        if key in known.removed:
            raise ConfigurationError(f"deepspeed_config has {key!r}, which DeepSpeed no longer supports. Remove it.")
        if key in in_zero and key not in _MODELS and key not in _TOP_AND_ZERO:
            raise ConfigurationError(
                f"deepspeed_config has {key!r} at the top level, where DeepSpeed ignores it. Move it to the section "
                f"zero_optimization: {{'zero_optimization': {{{key!r}: {value!r}}}}}."
            )
        if key not in known.words:
            raise ConfigurationError(_explain(key, "", known.words))
        if key in _MODELS:
            _check_section(value, key, _MODELS[key], known)
        elif key in _FLAT and isinstance(value, Mapping):
            for name in value:
                if name not in known.words:
                    raise ConfigurationError(_explain(name, key, known.words))


_TOP_AND_ZERO = ("elastic_checkpoint", "memory_efficient_linear")
"""Keys that DeepSpeed reads at the top level as well as in the section zero_optimization."""


def _check_section(section: object, path: str, model: str, known: _KnownNames) -> None:
    fields = known.models.get(model)
    if fields is None or section is None or section == "auto":
        return
    if not isinstance(section, Mapping):
        raise ConfigurationError(
            f"deepspeed_config has {path}={section!r}, but {path} is a section: give a dict of its options."
        )
    for name, value in section.items():
        if name in known.removed:
            raise ConfigurationError(
                f"deepspeed_config has {path}.{name}, which DeepSpeed no longer supports. Remove it."
            )
        if name not in fields:
            raise ConfigurationError(_explain(name, path, fields))
        inner = fields[name]
        if inner is not None and not isinstance(value, bool):
            _check_section(value, f"{path}.{name}", inner, known)


def _explain(name: str, section: str, known: Collection[str]) -> str:
    place = f" in {section}" if section else ""
    near = nearest_names(str(name), known, 2, 0.75)
    if not near and not section:
        near = [word for word in (*_MODELS, *_FLAT) if word.startswith(f"{name}_")]
    hint = did_you_mean(near, quoted=True) if near else "Remove it, or see DeepSpeed's documentation."
    return f"deepspeed_config has {name!r}{place}, which DeepSpeed does not know. {hint}"


@cache
def _read_known_names() -> _KnownNames | None:
    """Return the names that the installed DeepSpeed knows; `None` if its source does not have the expected form."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    trees = list(_parse_sources(Path(spec.submodule_search_locations[0])))
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    models = {name: _fields(node, classes) for name, node in classes.items()}
    removed = {word for tree in trees for word in removed_options(tree)}
    words = {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _WORD.fullmatch(node.value)
    }
    words |= {name for fields in models.values() for name in fields}
    if not {"train_batch_size", "zero_optimization"} <= words or "stage" not in models.get("DeepSpeedZeroConfig", {}):
        return None
    return _KnownNames(frozenset(words - removed), frozenset(removed), models)


def _parse_sources(root: Path) -> Iterator[ast.Module]:
    for folder in (root / "runtime", *sorted(root.glob("*")), *sorted(root.glob("runtime/*"))):
        if folder.name in ("inference", "launcher", "ops"):
            continue
        for path in sorted({path for pattern in _SOURCES for path in folder.glob(pattern)}):
            yield ast.parse(path.read_text(encoding="utf-8"))


def _fields(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> dict[str, str | None]:
    """Return the fields of a pydantic model and their aliases, each with its own model if it is a section."""
    fields: dict[str, str | None] = {}
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        names = [part.id for part in ast.walk(item.annotation) if isinstance(part, ast.Name)]
        inner = next((name for name in names if name in classes and name.endswith("Config")), None)
        fields[item.target.id] = inner
        if isinstance(item.value, ast.Call):
            for keyword in item.value.keywords:
                if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant):
                    fields[str(keyword.value.value)] = inner
    return fields
