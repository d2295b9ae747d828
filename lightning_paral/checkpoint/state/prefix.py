"""Weights of a part of a module, under the names that they have in that part."""

from collections.abc import Mapping
from typing import Any

from lightning_paral.checkpoint.state.optimizer import listing
from lightning_paral.errors import ConfigurationError


def as_prefix(text: str) -> str:
    """Return the prefix that names in `text` have: `model` and `model.` are both `model.`."""
    return f"{text.rstrip('.')}." if text.rstrip(".") else ""


def prefixes(weights: Mapping[str, Any]) -> str:
    """Return, for messages, the prefixes that there are, as long as all weights under them share them."""
    found: dict[str, list[str]] = {}
    for name in weights:
        found.setdefault(name.split(".")[0] + "." if "." in name else name, []).append(name)
    return ", ".join(f"{prefix} ({len(names)})" for prefix, names in found.items())


def without_prefix(weights: Mapping[str, Any], prefix: str, *, only: bool) -> dict[str, Any]:
    """Return the weights whose names begin with `prefix`, without it.

    Args:
        weights: by name.
        prefix: with its dot.
        only: leave out other weights.

    Raises:
        ConfigurationError: no name begins with it; or some do not, and are not to be left out.
    """
    kept = {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
    others = [name for name in weights if not name.startswith(prefix)]
    if not kept:
        raise ConfigurationError(
            f"No weight's name begins with {prefix!r}. The prefixes there are, and how many names have each: "
            f"{prefixes(weights) or 'none'}."
        )
    if others and not only:
        raise ConfigurationError(
            f"{len(others)} of {len(weights)} names do not begin with {prefix!r}, and would be lost. "
            + listing("They are", others)
            + "--only-prefix leaves them out."
        )
    return kept
