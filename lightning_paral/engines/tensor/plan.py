"""A plan: which layers are split over the tensor ranks, and how."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Style = Literal["colwise", "rowwise", "vocab", "local"]
STYLES: dict[str, str] = {
    "colwise": "split the output features of a linear layer",
    "rowwise": "split the input features of a linear layer",
    "vocab": "split the rows of an embedding, or the classes that a linear layer computes for a loss",
}
"""The styles that users can write, and what each does."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How one layer is split.

    Whatever the code around it does, the layer gives the results of the whole layer: a colwise layer returns a tensor
    of which each rank has a part, which is gathered where a function needs all of it, and a rowwise layer divides an
    input that is not split.
    """

    style: Style
    """`"local"`: a layer that is not split, inside of those that are, such as a norm of each head. Its gradients are
    summed over the ranks."""

    gathers_output: bool = False
    """For `"colwise"`: whether the output is gathered at once, for code that takes ordinary tensors only."""

    is_local: bool = False
    """For `"colwise"` and `"rowwise"`: whether the code between gets this rank's features as ordinary tensors, because
    transformers plans it so."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The layers of a module that are split, and those that are not."""

    splits: Mapping[str, Split]
    """By the name of the layer in the module."""

    whole: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The reason by the name of each layer with parameters that stays whole on every rank."""
