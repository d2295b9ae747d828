"""How each rank computes its part of a function's result from its parts of the arguments."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from lightning_paral.engines.tensor.arguments import Part, tensors_in
from lightning_paral.engines.tensor.layout import Layout

LayoutOf = Callable[[Tensor], Layout | None]
"""Returns the layout of a tensor; `None` for one that every rank has in full."""
Result = Layout | None | list[Layout | None]
"""The layout of a result; of a result with several tensors, a list."""


@dataclass(frozen=True)
class Call:
    """A call of a function of torch, with the arguments that its caller gives."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    layout_of: LayoutOf
    num_ranks: int

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, at any depth."""
        return tensors_in(self.args, self.kwargs)

    def given(self, *names: str) -> dict[str, Any] | None:
        """Return the arguments by name; `None` if there are others.

        Args:
            names: the names of the parameters, in order.
        """
        found = dict(zip(names, self.args, strict=False))
        if len(self.args) > len(names) or not set(self.kwargs) <= set(names) - set(found):
            return None
        return found | self.kwargs

    def stays(self, result: Result, **options: Any) -> "SplitCall":
        """Return the same call on the parts."""
        return SplitCall(self.function, self.args, self.kwargs, result, **options)


@dataclass(frozen=True)
class SplitCall:
    """The call with which each rank computes its part: split tensors in it stand for their parts.

    Tensors that every rank has in full are used as they are. Their gradients are summed over the ranks if `result` is
    split.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    result: Result = None
    shares_memory: bool = False
    """Whether the result is a view of the first argument."""
    is_random: bool = False
    """Whether it draws random numbers for the result."""


Rule = Callable[[Call], SplitCall | None]
"""Returns how a call is computed on the parts; `None` if that is not possible."""


RuleOfOne = Callable[[Call, Layout, dict[str, Any]], SplitCall | None]
"""Gets the layout of the tensor and the arguments by name as well."""


def rule_of_one(*names: str) -> Callable[[RuleOfOne], Rule]:
    """Return a decorator for rules of functions of one split tensor, whose other arguments have these names."""

    def decorate(rule: RuleOfOne) -> Rule:
        def checked(call: Call) -> SplitCall | None:
            given = call.given("input", *names)
            if given is None or not call.args or not isinstance(call.args[0], Tensor):
                return None
            layout = call.layout_of(given["input"])
            if layout is None or len(call.tensors) > 1:
                return None
            return rule(call, layout, given)

        return checked

    return decorate


def broadcast(call: Call, tensors: Sequence[Tensor]) -> tuple[Layout, dict[int, Part]] | None:
    """Return the layout of a result with the broadcast shape of `tensors`, and the parts that are needed, by `id`."""
    num_dims = max([tensor.ndim for tensor in tensors])
    found: Layout | None = None
    whole: list[Tensor] = []
    for tensor in tensors:
        layout = call.layout_of(tensor)
        if layout is None:
            whole.append(tensor)
            continue
        aligned = layout.moved(layout.dim + num_dims - tensor.ndim)
        if found not in (None, aligned):
            return None
        found = aligned
    if found is None:
        return None
    parts = {}
    for tensor in whole:
        dim = found.dim - (num_dims - tensor.ndim)
        if dim >= 0 and tensor.shape[dim] != 1:
            if tensor.shape[dim] != found.size:
                return None
            parts[id(tensor)] = Part(tensor, found.moved(dim))
    return found, parts


def dims_of(value: Any, num_dims: int) -> list[int] | None:
    """Return dimensions, counted from the first one; `None` if `value` is not an integer or a list of integers."""
    values = value if isinstance(value, tuple | list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
        return None
    return [each % num_dims for each in values]


def flat(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return what is given either as several arguments or as one list."""
    found = tuple(values)
    return tuple(found[0]) if len(found) == 1 and isinstance(found[0], tuple | list) else found
