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

    A layer alone gives the results of the whole layer: a colwise layer gathers its output, and a rowwise layer divides
    its input. These collectives are left out between layers whose activations are known to stay split.
    """

    style: Style
    """`"local"`: a layer that is not split, inside of those that are, such as a norm of each head. Its gradients are
    summed over the ranks."""

    splits_input: bool = True
    """For `"rowwise"`: whether the input is full, so that this layer has to divide it."""

    gathers_output: bool = True
    """For `"colwise"`: whether the output is gathered. Otherwise it stays split."""

    segments: tuple[int, ...] = ()
    """For an output that stays split: the segments of the features of which each rank has a part, as in `Layout`. The
    output then has the full shape, and is gathered where a function needs all of it. If empty, the code that follows
    gets this rank's features as an ordinary tensor."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The layers of a module that are split, and those that are not."""

    splits: Mapping[str, Split]
    """By the name of the layer in the module."""

    whole: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The reason by the name of each layer with parameters that stays whole on every rank."""
