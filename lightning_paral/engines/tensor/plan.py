"""A plan: which layers are split over the tensor ranks, and how; and the plans that users write."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch.nn import Module

from lightning_paral.engines.tensor.candidates import Layer
from lightning_paral.errors import ConfigurationError
from lightning_paral.text import did_you_mean, nearest_names

STYLES: dict[str, str] = {
    "colwise": "split the output features of a linear layer",
    "rowwise": "split the input features of a linear layer",
    "vocab": "split the rows of an embedding, or the classes that a linear layer computes for a loss",
}
"""How a layer can be split.

Whatever the code around it does, the layer gives the results of the whole layer: a colwise layer returns a tensor of
which each rank has a part, which is gathered where a function needs all of it, and a rowwise layer divides an input
that is not split.
"""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The layers of a module that are split, and those that are not."""

    splits: Mapping[str, str]
    """The style by the name of the layer in the module."""

    whole: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The reason by the name of each layer with parameters that stays whole on every rank."""


def check_plan(plan: Any) -> None:
    """Raise a `ConfigurationError` if `plan` is neither `"auto"` nor styles by patterns."""
    example = "{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise', 'head': 'vocab'}"
    if plan == "auto":
        return
    if not isinstance(plan, Mapping):
        raise ConfigurationError(f'plan={plan!r} has to be "auto" or a dict, for example {example}.')
    if not plan:
        raise ConfigurationError(f"plan={{}} splits no layer. Name some, for example {example}.")
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise ConfigurationError(f"plan: {pattern!r} has to be the name of a layer, for example {example}.")
        if style not in STYLES:
            known = "; ".join(f"{name!r}: {what}" for name, what in STYLES.items())
            question = did_you_mean(nearest_names(str(style), STYLES), quoted=True)
            raise ConfigurationError(
                " ".join(
                    filter(None, (f"plan {pattern!r}: {style!r} is no style.", question, f"The styles are {known}."))
                )
            )


def styles_of(module: Module, plan: Mapping[str, str], layers: Mapping[str, Layer]) -> dict[str, tuple[str, str]]:
    """Return the style of each layer that `plan` names, and the pattern that names it.

    Raises:
        ConfigurationError: a pattern names no layer, or something else than layers that can be split; or two patterns
            give a layer different styles.
    """
    parts = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    # A module with several names has the first of them in the plan.
    first: dict[Module, str] = {}
    for name, part in parts.items():
        first.setdefault(part, name)
    found: dict[str, tuple[str, str]] = {}
    for pattern, style in plan.items():
        named = [name for name in parts if fnmatch.fnmatchcase(name, pattern)]
        named = [name for name in named if first[parts[name]] in layers or _has_own_parameters(parts[name])]
        if not named:
            close = nearest_names(pattern, [*layers, *dict.fromkeys(map(folded, layers))])
            hint = (
                did_you_mean(close, quoted=True) or f"The layers are {', '.join(dict.fromkeys(map(folded, layers)))}."
            )
            raise ConfigurationError(f"plan {pattern!r} names no layer of {type(module).__name__}. {hint}")
        for name in dict.fromkeys(first[parts[name]] for name in named):
            if name not in layers:
                raise ConfigurationError(
                    f"plan {pattern!r}: {name} is a {type(parts[name]).__name__}, which cannot be split. Only "
                    "nn.Linear, nn.Embedding and Conv1D of transformers can."
                )
            if name in found and found[name][0] != style:
                raise ConfigurationError(
                    f"plan: {name} is {found[name][0]!r} by {found[name][1]!r}, and {style!r} by {pattern!r}."
                )
            found.setdefault(name, (style, pattern))
    return found


def folded(name: str) -> str:
    """Return `name` with a star in place of each number: `blocks.*.up` for `blocks.3.up`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _has_own_parameters(part: Module) -> bool:
    return next(part.parameters(recurse=False), None) is not None
