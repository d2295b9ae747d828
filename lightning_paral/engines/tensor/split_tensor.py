"""Tensors of which each rank has a part. They are gathered when an operation needs all of it."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import isgetsetdescriptor
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter, functional
from torch.utils.hooks import RemovableHandle

from lightning_paral.compat.torch.autograd import version_of
from lightning_paral.compat.torch.tensors import schema_of, tree_leaves, tree_map_only, without_memory
from lightning_paral.engines.tensor import rules
from lightning_paral.engines.tensor.collectives import Layout, copy_to_ranks, gather_parts, own_parts
from lightning_paral.engines.tensor.vocabulary import split_cross_entropy
from lightning_paral.errors import ConfigurationError

Draws = Callable[[], AbstractContextManager[None]]

_MAX_KNOWN = 10_000
"""After that many, the oldest is forgotten."""
_known: dict[Any, rules.Found | rules.Cuts | None] = {}
"""What `rules.find` has found, by the shapes of the arguments."""


class SplitTensor(Tensor):
    """A tensor of which each rank has the part that `parts` says.

    To a user's code it is a tensor of the full shape. Functions are computed on the parts where `rules.find` says how.
    Tensors that all ranks have in full may take part: this rank uses the part that it needs, and their gradients are
    summed. All other operations are *collective*: they gather the tensor, once, and return ordinary tensors.
    Attributes such as `shape` and `dtype`, and `repr`, do not communicate.

    Derivatives are exact. The gradients that hooks get are split too. `retain_grad`, and derivatives by it from
    `torch.autograd.grad`, are refused.
    """

    parts: Layout
    """Which part each rank has."""
    group: dist.ProcessGroup
    """The ranks. All of them must have the same gradient of each full tensor."""
    draws: Draws
    """Inside of this context, each rank draws numbers of its own."""
    learn: Callable[[Iterable[int]], None] | None
    """Tells the layer that computes these features where code cuts them into several tensors."""

    _local: Tensor
    _node: Any
    """The node of `_Wrap` in the graph; `None` without a graph."""
    _full: tuple[Tensor, float] | None
    """The full tensor, and the version of this rank's part from which it was gathered."""
    _copies: list[tuple[Tensor, int]]
    """The gathered copies of which code has views, and their versions; also of tensors that share memory with this."""

    @classmethod
    def of(cls, local: Tensor, parts: Layout, group: dist.ProcessGroup, draws: Draws = nullcontext) -> Self:
        """Return the tensor of all ranks, of which this rank has `local`. Autograd records operations on `local`."""
        if local.requires_grad and torch.is_grad_enabled():
            split: Self = _Wrap.apply(cls, local, parts, group)  # type: ignore[no-untyped-call]
            with torch.DisableTorchFunctionSubclass():
                split._node = split.grad_fn
        else:
            local = local.detach() if local.requires_grad else local
            split = cls.empty(local, parts)
            split._node = None
        split._local, split.parts, split.group, split.draws = local, parts, group, draws
        split._full, split._copies, split.learn = None, [], None
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
        """This rank's part.

        Raises:
            ConfigurationError: a gathered copy has been changed in place.
        """
        if self._copies:
            self.check_unchanged()
        with torch.DisableTorchFunctionSubclass():
            node = self.grad_fn
        if node is not self._node:  # the result of an `autograd.Function`, whose forward has no graph
            self._local = _Unwrap.apply(self)  # type: ignore[no-untyped-call]
            self._node = node
        return self._local

    def full(self) -> Tensor:
        """Return an ordinary tensor with the parts of all ranks, which must not be changed in place.

        *Collective*, unless they have been gathered before.
        """
        local = self.local
        needs_graph = torch.is_grad_enabled() and local.requires_grad
        if self._full is not None:
            full, version = self._full
            if version == self.local_version() and (full.requires_grad or not needs_graph):
                return full
        # Tensors of inference mode have no version, from which writes to a view of this copy are noticed.
        with torch.inference_mode(False), torch.set_grad_enabled(needs_graph):
            full = gather_parts(local, self.parts, self.group)
        self._full = full, self.local_version()
        return full

    def local_version(self) -> float:
        """Return the number of changes to this rank's part, which views of it share."""
        # Tensors of inference mode do not count changes, and NaN is not equal to itself.
        return float("nan") if self._local.is_inference() else version_of(self._local)

    def with_local(self, local: Tensor, layout: Layout | None = None) -> Self:
        """Return another tensor that is split over the same ranks.

        Args:
            local: this rank's part of it. If it shares memory with this one's, the full tensor would do so as well.
            layout: its layout; by default that of this tensor.
        """
        split = type(self).of(local, layout or self.parts, self.group, self.draws)
        split.learn = self.learn if split.parts.segments == self.parts.segments else None
        if _memory_of(local) == _memory_of(self._local):
            split._copies = self._copies
        return split

    def wrapper(self) -> Callable[[Tensor], "SplitTensor"]:
        """Return a function of a part that returns a tensor split as this one. It does not refer to this one."""
        return partial(type(self).of, parts=self.parts, group=self.group, draws=self.draws)

    def check_unchanged(self) -> None:
        """Raise a `ConfigurationError` if a gathered copy has been changed in place."""
        if any(version_of(copied) != version for copied, version in self._copies):
            raise _in_place_error("changed by an operation with inplace=True, or through a view such as x[..., 0]")

    # Functions

    @classmethod
    def _computed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Return the result of a function that can compute with the parts; `NotImplemented` for others."""
        if not all(isinstance(each, SplitTensor | Parameter) or type(each) is Tensor for each in tensors):
            return NotImplemented
        split = [each for each in tensors if isinstance(each, SplitTensor)]
        first = split[0]
        if func is functional.cross_entropy:
            is_of_first = args and args[0] is first and len(split) == 1
            return split_cross_entropy(*args, **kwargs) if is_of_first else NotImplemented
        if func in rules.CONVERSIONS and args[0] is not first:  # to the dtype of a tensor that is split
            own_args, own_kwargs = tree_map_only(SplitTensor, lambda each: each.local, (args, kwargs))
            return func(*own_args, **own_kwargs)
        found = first._find(func, args, kwargs, tensors)
        return NotImplemented if found is None else first._compute(found, func, args, kwargs)

    def _find(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> rules.Found | None:
        """Return what `rules.find` finds, now or for arguments of the same shapes."""
        ranks = dist.get_world_size(self.group)
        key = (func, ranks, rules.signature(args, _layout_of), rules.signature(kwargs, _layout_of))
        try:
            found = _known[key]
        except (KeyError, TypeError) as error:  # a TypeError: an argument cannot be hashed
            with torch.DisableTorchFunctionSubclass(), torch.no_grad():
                found = rules.find(func, args, kwargs, tensors, _layout_of, ranks)
            if isinstance(error, KeyError):
                if len(_known) >= _MAX_KNOWN:
                    del _known[next(iter(_known))]
                _known[key] = found
        if isinstance(found, frozenset):
            if self.learn is not None:
                self.learn(found)
            return None
        return found

    def _compute(self, found: rules.Found, func: Any, args: Any, kwargs: Any) -> Any:
        version = self.local_version()
        if found.function is not None:
            result = found.function(args[0].local, *found.rest)
        else:
            parts = iter(found.parts)

            def local(value: Tensor) -> Tensor:
                if isinstance(value, SplitTensor):
                    return value.local
                layout = next(parts, None)
                if layout is not None:
                    return own_parts(value, layout, self.group)
                return copy_to_ranks(value, self.group) if torch.is_grad_enabled() and value.requires_grad else value

            own_args, own_kwargs = rules.with_tensors((args, kwargs), local)
            with self.draws() if rules.draws(func, args, kwargs) else nullcontext():
                result = func(*own_args, **own_kwargs)
        if self.local_version() > version:
            if self._copies:
                raise _in_place_error("gathered for a view such as x[..., 0], which would not change")
            if torch.is_grad_enabled() and self._local.requires_grad:
                with torch.DisableTorchFunctionSubclass():
                    self.detach_()  # no zero gradients for the node before the change
                    _Changed.apply(self, self._local)  # type: ignore[no-untyped-call]
                    self._node = self.grad_fn
            return self
        if isinstance(found.result, Layout):
            return self.with_local(result, found.result)
        return tuple(self.with_local(each, parts) for each, parts in zip(result, found.result, strict=True))

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Call `hook` with the gradient, which is split too, and continue with the gradient that it returns."""
        layout, group, wrap = self.parts, self.group, self.wrapper()  # not the tensor, as the graph holds the hook

        def call(gradient: Tensor) -> Tensor | None:
            changed = hook(wrap(gradient))
            return None if changed is None else SplitTensor.own_part(changed, layout, group)

        return self.local.register_hook(call)  # type: ignore[no-untyped-call, no-any-return]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        # Not collective: often one rank prints alone.
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {self.parts}, on this rank {self._local!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], SplitTensor) else None
        if first is not None and func in _OF_ALL:
            return _OF_ALL[func](func, *args, **kwargs)
        tensors = rules.tensors_in(args, kwargs)
        used = [each for each in tensors if isinstance(each, SplitTensor)]
        if used:
            result = cls._computed(func, args, kwargs, tensors)
            if result is not NotImplemented:
                return result
        name = str(getattr(func, "__name__", func))
        by = {torch.autograd.grad: args[1:2], Tensor.retain_grad: args}.get(func, ())
        if any(isinstance(each, SplitTensor) for each in rules.tensors_in(*by)):
            raise ConfigurationError(
                f"{_WHAT} have no gradient for {name}. Read it in x.register_hook(...), {_LEAVE_OUT}"
            )
        if isinstance(kwargs.get("out"), SplitTensor) or (first is not None and rules.is_in_place(func)):
            raise _in_place_error(f"given to {name}")
        args, kwargs = tree_map_only(SplitTensor, SplitTensor.full, (args, kwargs))
        copies = [each._full[0] for each in used if each._full is not None]
        versions = [version_of(each) for each in copies]
        result = func(*args, **kwargs)
        shown = {_memory_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        for each, copied, version in zip(used, copies, versions, strict=True):
            if _memory_of(copied) in shown or version_of(copied) != version:
                each._copies.append((copied, version))
                each.check_unchanged()
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Operations in C++ arrive here, below autograd, whose graph has `_Wrap`.
        kwargs, arguments = kwargs or {}, schema_of(func).arguments
        given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        written = [given.get(each.name) for each in arguments if each.is_write]
        if any(isinstance(each, SplitTensor) for each in rules.tensors_in(*written)):
            raise _in_place_error(f"given to {func}")
        with torch.no_grad():
            args, kwargs = tree_map_only(SplitTensor, SplitTensor.full, (args, kwargs))
        return func(*args, **kwargs)


class _Wrap(torch.autograd.Function):
    """Puts a split tensor into the graph, for operations that are not recorded on its parts."""

    @staticmethod
    def forward(ctx: Any, cls: type[SplitTensor], local: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
        ctx.parts, ctx.group = layout, group
        return cls.empty(local, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        return None, SplitTensor.own_part(gradient, ctx.parts, ctx.group), None, None


class _Changed(torch.autograd.Function):
    """Puts a split tensor whose part was changed in place into the graph again, behind that change."""

    @staticmethod
    def forward(ctx: Any, split: SplitTensor, local: Tensor) -> SplitTensor:
        ctx.parts, ctx.group = split.parts, split.group
        ctx.mark_dirty(split)
        return split

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, SplitTensor.own_part(gradient, ctx.parts, ctx.group)


class _Unwrap(torch.autograd.Function):
    """Gives this rank's part of a split tensor that an `autograd.Function` has returned the gradient of its result."""

    @staticmethod
    def forward(ctx: Any, split: SplitTensor) -> Tensor:
        ctx.wrap = split.wrapper()
        return split._local.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        wrapped: Tensor = ctx.wrap(gradient)
        return wrapped


def _memory_of(tensor: Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


def _layout_of(tensor: Tensor) -> Layout | None:
    return tensor.parts if isinstance(tensor, SplitTensor) else None


_WHAT = "Tensors of which each tensor rank has a part"
_LEAVE_OUT = "or leave the layer that computes them out of the plan: plan={...}."


def _in_place_error(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{_WHAT} cannot be changed in place here. They were {what}. Use an operation that returns a new tensor, such "
        f"as x.masked_fill(mask, value) or torch.where(mask, values, x), {_LEAVE_OUT}"
    )


def _detach(func: Any, split: SplitTensor, *args: Any) -> SplitTensor:
    """Compute `Tensor.detach`, or return `Tensor.data`."""
    return split.with_local(split.local.detach())


def _of_same_shape(func: Any, split: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Compute a function that depends on the shape, the dtype and the device only."""
    return func(split.local.new_empty(()).expand(split.shape), *args, **kwargs)


_ATTRIBUTES = {name: getattr(Tensor, name) for name in dir(Tensor)}
_OF_VALUES = {"data", "real", "imag", "T", "H", "mT", "mH"}
_METADATA = {
    *(each.__get__ for name, each in _ATTRIBUTES.items() if isgetsetdescriptor(each) and name not in _OF_VALUES),
    *rules.named("size dim ndimension numel nelement element_size stride storage_offset get_device"),
    *rules.named("is_floating_point is_complex is_signed is_inference is_conj is_neg __len__ __hash__ __dir__"),
}
"""What is known without the values. Of strides, those of the gathered tensor."""
_OF_SHAPE = rules.named(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor"
)
"""Functions that return an ordinary tensor, and depend on the shape, the dtype and the device only."""
_OF_ALL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((*rules.named("detach"), Tensor.data.__get__), _detach),  # type: ignore[attr-defined]
    **dict.fromkeys(_OF_SHAPE, _of_same_shape),
    Tensor.is_contiguous: lambda func, split, *args, **kwargs: split.local.is_contiguous(*args, **kwargs),
    Tensor.mT.__get__: lambda func, split: split.transpose(-2, -1),  # type: ignore[attr-defined]
    Tensor.__format__: lambda func, split, spec: object.__format__(split, spec),
}
"""The functions that need no other rank's part, and no rule."""
