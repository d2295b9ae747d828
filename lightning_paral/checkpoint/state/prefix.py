"""Select the weights of a submodule by the prefix of their names."""

from collections.abc import Mapping
from typing import Any

from lightning_paral.checkpoint.state.optimizer import list_names
from lightning_paral.errors import ConfigurationError


def as_prefix(text: str) -> str:
    """Return `text` with exactly one dot at its end: `model.` for both `model` and `model.`; "" for ""."""
    return f"{text.rstrip('.')}." if text.rstrip(".") else ""


def prefixes(weights: Mapping[str, Any]) -> str:
    """Return the first components of all names, each with the number of its weights, as text for messages."""
    found: dict[str, list[str]] = {}
    for name in weights:
        found.setdefault(name.split(".")[0] + "." if "." in name else name, []).append(name)
    return ", ".join(f"{prefix} ({len(names)})" for prefix, names in found.items())


def without_prefix(weights: Mapping[str, Any], prefix: str, *, only: bool) -> dict[str, Any]:
    """Return the weights whose names begin with `prefix`, with the prefix removed.

    Args:
        weights: weights by name.
        prefix: the prefix, including its dot.
        only: whether to drop other weights instead of raising an error.

    Raises:
        ConfigurationError: no name begins with the prefix, or some names do not and `only` is `False`.
    """
    kept = {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
    others = [name for name in weights if not name.startswith(prefix)]
    if not kept:
        raise ConfigurationError(
            f"No weight's name begins with {prefix!r}. The prefixes in the checkpoint, each with its number of "
            f"weights: {prefixes(weights) or 'none'}."
        )
    if others and not only:
        raise ConfigurationError(
            f"{len(others)} of {len(weights)} names do not begin with {prefix!r}, and would be lost. "
            + list_names("They are", others)
            + "Pass --only-prefix to leave them out."
        )
    return kept
