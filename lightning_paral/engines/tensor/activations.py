"""Activations of which each rank has some of the heads, or some of the positions."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass
from lightning_paral.engines.tensor import split_functions, split_pieces, split_reshapes, split_shapes
from lightning_paral.engines.tensor.arguments import Part, tensors_in, with_tensors
from lightning_paral.engines.tensor.collectives import copy_to_ranks
from lightning_paral.engines.tensor.layout import Layout, own_parts, sizes_between
from lightning_paral.engines.tensor.split_calls import Call, Rule, SplitCall
from lightning_paral.engines.tensor.split_tensor import SplitTensor
from lightning_paral.errors import ConfigurationError

RULES: dict[Any, Rule] = {**split_functions.RULES, **split_reshapes.RULES, **split_shapes.RULES, **split_pieces.RULES}
"""The functions that can compute with parts of activations."""


class DrawsApart(Protocol):
    """Lets each rank draw random numbers of its own, and all ranks equal ones afterwards."""

    def own_draws(self) -> Any:
        """Return a context manager in which this rank draws its own numbers."""
        ...


class SplitActivation(SplitTensor):
    """Activations of which each rank has a part of one dimension, such as some of the heads of an attention.

    A function is computed on the parts if `RULES` has a rule for it, and the rule applies to its arguments. Tensors
    that all ranks have in full may take part: this rank uses the part that it needs, and their gradients are summed.
    """

    what = "Activations of which each tensor rank has a part"
    example = "x"
    may_change = True

    streams: DrawsApart
    learn: Callable[[Iterable[int]], None] | None
    """Tells the layer that computes these features where code cuts them into several tensors."""
    _first_version: float
    """The version of this rank's part that autograd has recorded."""

    @classmethod
    def of(cls, local: Tensor, parts: Layout, group: dist.ProcessGroup, streams: DrawsApart) -> Self:
        """Return the activations of which this rank has `local`.

        Args:
            local: this rank's part.
            parts: which part it is. Each segment has to be divided evenly.
            group: the ranks.
            streams: for random numbers.
        """
        split = cls.wrap(local, parts, group)
        split.streams, split.learn, split._first_version = streams, None, split.local_version()
        return split

    def with_local(self, local: Tensor, parts: Layout | None = None, *, shares_memory: bool = False) -> Self:
        """Return other activations that are split over the same ranks."""
        split = super().with_local(local, parts, shares_memory=shares_memory)
        if split is not self:
            split.streams, split._first_version = self.streams, split.local_version()
            split.learn = self.learn if split.parts.segments == self.parts.segments else None
        return split

    def wrapper(self) -> Callable[[Tensor], SplitTensor]:
        """Return a function of a part that returns a tensor split as this one. It does not refer to this one."""
        return partial(type(self).of, parts=self.parts, group=self.group, streams=self.streams)

    @classmethod
    def compute_split(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that can compute with the parts; `NotImplemented` for others."""
        rule = RULES.get(func)
        if rule is None:
            return NotImplemented
        tensors = tensors_in(args, kwargs)
        if not all(isinstance(each, SplitActivation | Parameter) or type(each) is Tensor for each in tensors):
            return NotImplemented
        first = next(each for each in tensors if isinstance(each, SplitActivation))
        with DisableTorchFunctionSubclass():
            call = rule(Call(func, args, kwargs, _layout_of, dist.get_world_size(first.group)))
            if call is None and first.learn is not None:
                first._look_for_cuts(rule, func, args, kwargs)
        return NotImplemented if call is None else first._compute(call)

    def _look_for_cuts(self, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the layer where to cut its features, if a function could then compute with the parts."""
        num_ranks = dist.get_world_size(self.group)
        for cuts in _possible_cuts(self.parts.size, args, kwargs):
            layout = Layout(self.parts.dim, sizes_between(cuts, self.parts.size))
            call = Call(func, args, kwargs, lambda each: layout if each is self else _layout_of(each), num_ranks)  # noqa: B023
            if layout.is_even(num_ranks) and rule(call) is not None and self.learn is not None:
                return self.learn(cuts)
        return None

    def _compute(self, call: SplitCall) -> Any:
        sums_gradients = call.result is not None and torch.is_grad_enabled()

        def local(value: Any) -> Any:
            if isinstance(value, SplitActivation):
                return value.local
            if isinstance(value, Part):
                return own_parts(value.tensor, value.layout, self.group)
            return copy_to_ranks(value, self.group) if sums_gradients and value.requires_grad else value

        args, kwargs = with_tensors((call.args, call.kwargs), local)
        if call.is_random:
            with self.streams.own_draws():
                result = call.function(*args, **kwargs)
        else:
            result = call.function(*args, **kwargs)
        if isinstance(call.result, list):
            return tuple(self._wrapped(each, parts, call) for each, parts in zip(result, call.result, strict=True))
        return self._wrapped(result, call.result, call)

    def _wrapped(self, local: Tensor, parts: Layout | None, call: SplitCall) -> Tensor:
        if parts is None:
            return local
        first = call.args[0] if call.args else None
        if isinstance(first, SplitActivation) and local is first._local and parts == first.parts:
            if first._first_version != first.local_version():
                first.record_change()
                first._first_version = first.local_version()
            return first
        return self.with_local(local, parts, shares_memory=call.shares_memory)

    def check_graph(self, func: Any) -> None:
        """Raise a `ConfigurationError` if a view of this rank's part has been changed in place."""
        if self._node is not None and self._first_version != self.local_version():
            raise ConfigurationError(
                f"{self.what} were changed in place through a view, and then given to {func}, called by code that "
                "Python does not show. The gradient is not known. Use an operation that returns a new tensor."
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for each in tensors_in(args, kwargs or {}):
            if isinstance(each, SplitActivation):
                each.check_graph(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _possible_cuts(size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Iterable[int]]:
    """Yield where a function may cut a dimension: in two or three, at given sizes, or around a slice."""
    for count in (2, 3):
        if size % count == 0:
            yield range(size // count, size, size // count)
    for value in (*args[1:], *kwargs.values()):
        if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value) and sum(value) == size:
            yield [*accumulate(value)][:-1]
        last = value[-1] if isinstance(value, tuple) and value else None
        if isinstance(last, slice):
            yield {*last.indices(size)[:2]}


def _layout_of(tensor: Any) -> Layout | None:
    return tensor.parts if isinstance(tensor, SplitActivation) else None
