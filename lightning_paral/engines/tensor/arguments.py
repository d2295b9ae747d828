"""Find and replace the tensors in the arguments of a function of torch, faster than a general tree of containers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_paral.engines.tensor.layout import Layout


@dataclass(frozen=True)
class Part:
    """In arguments: this rank's part of a tensor that every rank has in full."""

    tensor: Tensor
    layout: Layout


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments, and in tuples, lists and dicts of them."""
    found: list[Tensor] = []
    _collect(args, found)
    if kwargs:
        _collect(kwargs.values(), found)
    return found


def _collect(values: Any, found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def with_tensors(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return an argument with `replace` of each tensor and `Part`. Tuples of other classes stay as they are."""
    if isinstance(value, Tensor | Part):
        return replace(value)
    if type(value) is tuple:
        return tuple([with_tensors(each, replace) for each in value])
    if type(value) is list:
        return [with_tensors(each, replace) for each in value]
    if type(value) is dict:
        return {name: with_tensors(each, replace) for name, each in value.items()}
    return value
