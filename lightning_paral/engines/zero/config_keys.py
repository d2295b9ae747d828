"""Check the keys of a DeepSpeed configuration against DeepSpeed's source, without importing DeepSpeed.

When DeepSpeed is imported, it chooses its accelerator for the rest of the process.
"""

import importlib.util
import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lightning_paral.errors import ConfigurationError
from lightning_paral.suggestions import did_you_mean, nearest_names

_USERS_KEYS = ("compression_training", "data_efficiency", "autotuning", "elasticity", "hybrid_engine")
"""Sections with names that the user chooses, or that other parts of DeepSpeed read."""
_TOP_AND_ZERO = ("elastic_checkpoint", "memory_efficient_linear")
"""Keys that DeepSpeed reads at the top level as well as in the section zero_optimization."""
_WORD = re.compile(r"""["']([a-z][a-z0-9_]*)["']""")
_FIELD = re.compile(r"^    ([a-z][a-z0-9_]*): ", re.MULTILINE)
_ALIAS = re.compile(r'alias="([a-z0-9_]+)"')


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise a `ConfigurationError` for a key that DeepSpeed does not know. The message suggests the nearest known keys.

    DeepSpeed itself ignores an unknown key at the top level, and raises on every rank for one in a section.
    """
    words, in_zero = _read_known_names()
    for key, value in config.items():
        if not isinstance(key, str) or key.startswith("_"):  # used for comments, which JSON lacks
            continue
        if key in in_zero and key not in (*_TOP_AND_ZERO, "zero_optimization"):
            raise ConfigurationError(
                f"deepspeed_config has {key!r} at the top level, where DeepSpeed ignores it. Move it to the section "
                f"zero_optimization: {{'zero_optimization': {{{key!r}: {value!r}}}}}."
            )
        if key not in words:
            raise ConfigurationError(_explain(key, "", words))
        if key == "zero_optimization":
            _check_section(value, key, in_zero, words)
        elif key not in _USERS_KEYS and isinstance(value, Mapping):
            _check_section(value, key, words, words)


def _check_section(section: object, path: str, known: Collection[str], words: Collection[str]) -> None:
    if not isinstance(section, Mapping):
        raise ConfigurationError(
            f"deepspeed_config has {path}={section!r}, but {path} is a section: give a dict of its options."
        )
    for name, value in section.items():
        if name not in known:
            raise ConfigurationError(_explain(name, path, known))
        if isinstance(value, Mapping):
            _check_section(value, f"{path}.{name}", words, words)


def _explain(name: str, section: str, known: Collection[str]) -> str:
    place = f" in {section}" if section else ""
    near = nearest_names(str(name), known, 2, 0.75)
    if not near and not section:
        near = [word for word in ("zero_optimization", "activation_checkpointing") if word.startswith(f"{name}_")]
    hint = did_you_mean(near, quoted=True) if near else "Remove it, or see DeepSpeed's documentation."
    return f"deepspeed_config has {name!r}{place}, which DeepSpeed does not know. {hint}"


@cache
def _read_known_names() -> tuple[frozenset[str], frozenset[str]]:
    """Return all names in DeepSpeed's source of configurations, and the fields of the section zero_optimization."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    root = Path(spec.submodule_search_locations[0])  # type: ignore[index]
    words: set[str] = set()
    for path in (*root.glob("*/*con*.py"), *root.glob("runtime/*/*con*.py"), root / "runtime" / "torch_autocast.py"):
        if path.parent.name in ("inference", "launcher"):
            continue
        source = path.read_text(encoding="utf-8")
        words.update(_WORD.findall(source), _FIELD.findall(source))
    zero = (root / "runtime" / "zero" / "config.py").read_text(encoding="utf-8")
    return frozenset(words), frozenset(_FIELD.findall(zero) + _ALIAS.findall(zero))
