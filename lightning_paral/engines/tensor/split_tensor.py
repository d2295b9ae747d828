"""Tensors of which each rank has a part. They are gathered when an operation needs all of it."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass, version_of
from lightning_paral.compat.torch.tensors import schema_of, tree_leaves, tree_map_only, without_memory
from lightning_paral.engines.tensor.arguments import tensors_in
from lightning_paral.engines.tensor.functions import METADATA, OF_SHAPE, functions, getters
from lightning_paral.engines.tensor.in_place import error_of_function, in_place_error
from lightning_paral.engines.tensor.layout import Layout, gather_parts, own_parts, own_ranges
from lightning_paral.engines.tensor.split_graph import Change, Unwrap, Wrap
from lightning_paral.errors import ConfigurationError


class SplitTensor(Tensor):
    """A tensor of which each rank has the part that `parts` says.

    To a user's code it is a tensor of the full shape. Subclasses say which functions compute with the parts, in
    `compute_split`. All other operations are *collective*: they gather the tensor, once, and return ordinary tensors.
    Attributes such as `shape` and `dtype`, `repr` and `copy.deepcopy` do not communicate.

    First derivatives are exact. The gradients that hooks get, and those from `torch.autograd.grad` and `retain_grad`,
    are split too.
    """

    what: ClassVar[str]
    """The subject of error messages."""
    example: ClassVar[str]
    """The name of a variable in error messages."""
    may_change: ClassVar[bool] = False
    """Whether functions that change it in place can compute with the parts."""

    parts: Layout
    """Which part each rank has."""
    group: dist.ProcessGroup
    """The ranks. All of them must have the same gradient of each full tensor."""

    _local: Tensor
    _node: Any
    """The node of `Wrap` in the graph; `None` without a graph."""
    _full: tuple[Tensor, float] | None
    """The full tensor, and the version of this rank's part from which it was gathered."""
    _copies: list[tuple[ref[Tensor], int]]
    """The gathered copies and their versions, of this tensor and of those that share memory with it."""

    @classmethod
    def wrap(cls, local: Tensor, layout: Layout, group: dist.ProcessGroup) -> Self:
        """Return the tensor of all ranks, of which this rank has `local`. Autograd records operations on `local`."""
        if local.requires_grad and torch.is_grad_enabled():
            split: Self = Wrap.apply(cls, local, layout, group)  # type: ignore[no-untyped-call]
            with DisableTorchFunctionSubclass():
                split._node = split.grad_fn
        else:
            local = local.detach() if local.requires_grad else local
            split = cls.empty(local, layout)
            split._node = None
        split._local, split.parts, split.group, split._full, split._copies = local, layout, group, None, []
        return split

    @classmethod
    def empty(cls, local: Tensor, layout: Layout) -> Self:
        """Return a tensor with the shape of all ranks' parts, which has none yet."""
        shape = [*local.shape]
        shape[layout.dim] = layout.size
        return without_memory(cls, shape, local.dtype, local.device)

    @staticmethod
    def own_part(full: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
        """Return this rank's part of a tensor, split or not, as `layout` says."""
        if isinstance(full, SplitTensor):
            if full.parts == layout:
                return full.local
            full = full.full()
        return own_parts(full, layout, group)

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        with DisableTorchFunctionSubclass():
            node = self.grad_fn
        if node is not self._node:  # the result of an `autograd.Function`, whose forward has no graph
            self._local = Unwrap.apply(self)  # type: ignore[no-untyped-call]
            self._node = node
        return self._local

    @property
    def part_without_graph(self) -> Tensor:
        """This rank's part, detached."""
        return self._local.detach()

    def full(self) -> Tensor:
        """Return an ordinary tensor with the parts of all ranks, which must not be changed in place.

        *Collective*, unless they have been gathered before.
        """
        local = self.local
        needs_graph = torch.is_grad_enabled() and local.requires_grad
        if self._full is not None:
            full, version = self._full
            is_known = not self.may_change or version == self.local_version()
            if is_known and (full.requires_grad or not needs_graph):
                return full
        # Tensors of inference mode have no version, from which writes to a view of this copy are noticed.
        with torch.inference_mode(False), torch.set_grad_enabled(needs_graph):
            full = gather_parts(local, self.parts, self.group)
        self._full = full, self.local_version()
        self._copies.append((ref(full), version_of(full)))
        return full

    def local_version(self) -> float:
        """Return the number of changes to this rank's part, which views of it share."""
        # Tensors of inference mode do not count changes, and NaN is not equal to itself.
        return float("nan") if self._local.is_inference() else version_of(self._local)

    def with_local(self, local: Tensor, layout: Layout | None = None, *, shares_memory: bool = False) -> Self:
        """Return another tensor that is split over the same ranks.

        Args:
            local: this rank's part of it.
            layout: its layout; by default that of this tensor.
            shares_memory: whether the full tensor would share memory with this one.
        """
        if local is self._local and layout in (None, self.parts):
            return self
        split = type(self).wrap(local, layout or self.parts, self.group)
        if shares_memory:
            split._copies = self._copies
        return split

    def record_change(self) -> None:
        """Tell autograd that an operation has changed this rank's part in place."""
        if self._local.requires_grad and torch.is_grad_enabled():
            with DisableTorchFunctionSubclass():
                Change.apply(self, self._local)  # type: ignore[no-untyped-call]
                self._node = self.grad_fn

    def wrapper(self) -> Callable[[Tensor], "SplitTensor"]:
        """Return a function of a part that returns a tensor split as this one. It does not refer to this one."""
        return partial(type(self).wrap, layout=self.parts, group=self.group)

    def check_unchanged(self) -> None:
        """Raise a `ConfigurationError` if a gathered copy has been changed in place."""
        for copied, version in self._copies:
            found = copied()
            if found is not None and version_of(found) != version:
                raise in_place_error(
                    self.what,
                    f"changed by an operation with inplace=True, or through a view such as {self.example}[..., 0]",
                    f"Use an operation that returns a new tensor, or change a copy: copied = {self.example} + 0.",
                )

    def check_graph(self, func: Any) -> None:
        """Raise a `ConfigurationError` if `func`, which code outside of Python calls, would get an outdated graph."""

    @classmethod
    def compute_split(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that can compute with the parts; `NotImplemented` for others."""
        return NotImplemented

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call `hook` with the gradient, which is split too, and continue with the gradient that it returns."""
        layout, group, wrap = self.parts, self.group, self.wrapper()  # not the tensor, as the graph holds the hook

        def call(gradient: Tensor) -> Tensor | None:
            changed = hook(wrap(gradient))
            return None if changed is None else SplitTensor.own_part(changed, layout, group)

        handle: RemovableHandle = self.local.register_hook(call)  # type: ignore[no-untyped-call]
        return handle

    def retain_grad(self) -> None:
        """Keep the gradient in `grad`, which is split too."""
        self.local.retain_grad()

    @property
    def grad(self) -> Tensor | None:
        """The gradient; `None` unless `retain_grad` has been called before the backward pass."""
        gradient = self.local.grad
        return None if gradient is None else self.with_local(gradient.detach())

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.local.grad = None if value is None else self.own_part(value, self.parts, self.group)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raise a `ConfigurationError` if `requires_grad` would change."""
        if requires_grad != self.requires_grad:
            raise ConfigurationError(
                f"{self.what} got requires_grad={requires_grad}, but only an ordinary tensor can become a leaf of the "
                f"graph. Write: {self.example} = {self.example}.detach() + 0."
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = self.with_local(copy.deepcopy(self.local, memo))
        copied: Self = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        # Not collective: often one rank prints alone.
        own = ", ".join(f"{each.start}:{each.stop}" for each in own_ranges(self.parts, self.group))
        where = f"{own} of dimension {self.parts.dim} on this rank"
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {where}={self.local!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        used = [each for each in tensors_in(args, kwargs) if isinstance(each, SplitTensor)]
        for each in used:
            if each._copies:
                each.check_unchanged()
        if func is torch.autograd.grad:
            return _gradients(*args, **kwargs)
        if func is Tensor.view_as and isinstance(args[0], SplitTensor) and args[1] is args[0]:
            # Also where an `autograd.Function` returns its input, as FSDP2's does at each unit.
            args[0].check_graph(func)
            return args[0].with_local(args[0].local.view_as(args[0].local), shares_memory=True)
        if func in _OF_ALL and args and isinstance(args[0], SplitTensor):
            return _OF_ALL[func](func, *args, **kwargs)
        if used and all(isinstance(each, cls) for each in used):
            result = cls.compute_split(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if any(isinstance(each, SplitTensor) for each in tensors_in((kwargs.get("out"),), {})):
            raise in_place_error(cls.what, "given as `out`", "Use the tensor that the operation returns.")
        error = error_of_function(func, cls.what, cls.example)
        if error is not None and args and isinstance(args[0], SplitTensor):
            raise error
        args, kwargs = tree_map_only(SplitTensor, SplitTensor.full, (args, kwargs))
        result = func(*args, **kwargs)
        for each in used:
            each.check_unchanged()
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Operations in C++ arrive here, below autograd, whose graph has `Wrap`.
        kwargs = kwargs or {}
        for number, argument in enumerate(schema_of(func).arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and any(isinstance(leaf, SplitTensor) for leaf in tree_leaves(value)):
                raise in_place_error(cls.what, f"given to {func}", "Use an operation that returns a new tensor.")
        with torch.no_grad():
            args, kwargs = tree_map_only(SplitTensor, SplitTensor.full, (args, kwargs))
        return func(*args, **kwargs)


def _gradients(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> tuple[Tensor | None, ...]:
    """Return what `torch.autograd.grad` returns; the gradients of split tensors are split."""
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    outputs, grad_outputs = tree_map_only(SplitTensor, SplitTensor.full, (outputs, grad_outputs))
    own = [tensor.local if isinstance(tensor, SplitTensor) else tensor for tensor in inputs]
    found = torch.autograd.grad(outputs, own, grad_outputs, **options)
    return tuple(
        tensor.with_local(gradient) if isinstance(tensor, SplitTensor) and gradient is not None else gradient
        for tensor, gradient in zip(inputs, found, strict=True)
    )


def _detach(func: Any, split: SplitTensor, *args: Any) -> SplitTensor:
    """Compute `Tensor.detach`, or return `Tensor.data`."""
    return split.with_local(split.local.detach(), shares_memory=True)


def _of_same_shape(func: Any, split: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Compute a function that depends on the shape, the dtype and the device only."""
    return func(split.local.new_empty(()).expand(split.shape), *args, **kwargs)


_OF_ALL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(functions("detach"), _detach),
    **dict.fromkeys(getters("data"), _detach),
    **dict.fromkeys(OF_SHAPE, _of_same_shape),
    Tensor.retains_grad.__get__: lambda func, split: split.local.retains_grad,  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__: lambda func, split, value: split.requires_grad_(value),  # type: ignore[attr-defined]
    Tensor.__format__: lambda func, split, spec: object.__format__(split, spec),
}
"""The functions of all split tensors that need no other rank's part."""
