"""Deferred construction: a module is built without its values, which are drawn later, a unit at a time, and the same.

While `configure_model` runs, large tensors are made on the meta device, and every operation on them is written down
together with the state of the random number generator before it. Any tensor can then be computed by repeating what
led to it. Operations that draw random numbers run once on the spot, into memory that is freed at once: whatever is drawn
after them comes out as it would have.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

DEFERRED_BYTES = 64 * 1024
"""Tensors up to this size are made at once; there is nothing to spare, and code likes to look at them."""

_aten = torch.ops.aten
_OVERWRITING = {
    _aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_, _aten.random_, _aten.bernoulli_, _aten.eye.m_out,
}  # fmt: skip


@dataclass(frozen=True)
class _View:
    """A tensor that is not there: where it lies in a storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def covers(self, num_bytes: int) -> bool:
        return self.size.numel() * self.dtype.itemsize == num_bytes


@dataclass(frozen=True)
class _Operation:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[_View | None, ...]
    """The results, for those with a storage of their own."""
    reads: frozenset[int]
    overwrites: frozenset[int]
    writes: frozenset[int]
    drawn_from: tuple[torch.device, Tensor] | None
    """For random operations, the generator's device and its state before."""


class DeferredConstruction:
    """What was made without values inside `recording()`, and the way to the values.

    Args:
        device: where the values are to be, and whose generator draws them where the code names none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._operations: list[_Operation] = []
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
        self._owned: dict[int, tuple[Tensor, _View]] = {}
        self._shared: dict[int, Tensor] = {}

    @contextmanager
    def recording(self, module: Module) -> Iterator[None]:
        """Make large tensors without values until the end of the block; then see which of them `module` has."""
        with self.device, _Disguise(self), _Recorder(self):
            yield
        for part in module.modules():
            for tensor in _tensors_of(part):
                if self.owns(tensor):
                    self._owned[id(tensor)] = (tensor, self.view(tensor))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in the module that has no value yet."""
        return not self._owned

    def fill(self, modules: Iterable[Module]) -> None:
        """Compute what `modules` themselves hold, submodules aside, and put it in place of what has no value."""
        modules = list(modules)
        wanted: dict[int, _View] = {}
        for module in modules:
            for tensor in _tensors_of(module):
                if id(tensor) in self._owned:
                    wanted[id(tensor)] = self._owned[id(tensor)][1]
        values = dict(zip(wanted, self.values(list(wanted.values())), strict=True))
        filled = dict(self._shared)
        for key, value in values.items():
            tensor = self._owned.pop(key)[0]
            value = value.to(tensor.dtype)  # by `module.bfloat16()` since
            if isinstance(tensor, Parameter):
                value = Parameter(value.detach(), requires_grad=tensor.requires_grad)
                vars(value).update(vars(tensor))
            else:
                self._shared[key] = value  # buffers may lie in several units, parameters never do
            filled[key] = value
        for module in modules:
            _replace(module, filled)

    def values(self, views: list[_View]) -> list[Tensor]:
        """Repeat what led to `views`, and only that."""
        needed = {view.storage for view in views}
        path = []
        for operation in reversed(self._operations):
            if needed.isdisjoint(operation.writes):
                continue
            path.append(operation)
            needed = (needed - operation.overwrites) | operation.reads
        real: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for operation in reversed(path):
                self._repeat(operation, real)
            return [self._real(view, real) for view in views]

    # For the recorder:

    def owns(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        with torch._C.DisableTorchFunction():
            return value.is_meta and value.untyped_storage()._cdata in self._storages

    def view(self, tensor: Tensor) -> _View:
        return _View(
            storage=tensor.untyped_storage()._cdata,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tuple(tensor.stride()),
            offset=tensor.storage_offset(),
        )

    def device_of(self, tensor: Tensor) -> torch.device:
        return self._storages[tensor.untyped_storage()._cdata][1]

    def real(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.values([self.view(tensor) for tensor in tensors])

    def record(
        self, func: Any, args: Any, kwargs: Any, results: Any, device: torch.device, drawn_from: Any, written: list[Tensor]
    ) -> None:
        made = tuple(
            self.view(result) if isinstance(result, Tensor) and not self.owns(result) else None
            for result in tree_flatten(results)[0]
        )
        writes = {view.storage for view in made if view}
        for result in tree_flatten(results)[0]:
            if isinstance(result, Tensor) and not self.owns(result):
                self._storages[result.untyped_storage()._cdata] = (result.untyped_storage(), device)
        changed = [self.view(tensor) for tensor in written]
        if not writes and not changed:
            return  # a view: found again by where it lies
        writes |= {view.storage for view in changed}
        overwrites = {view.storage for view in made if view}
        if func.overloadpacket in _OVERWRITING:
            overwrites |= {
                view.storage for view in changed if view.covers(self._storages[view.storage][0].nbytes())
            }
        inputs = [self.view(value) for value in tree_flatten((args, kwargs))[0] if self.owns(value)]
        reads = {view.storage for view in inputs} - overwrites
        self._operations.append(
            _Operation(
                func=func,
                args=tree_map(self._placeholder, args),
                kwargs=tree_map(self._placeholder, kwargs),
                made=made,
                reads=frozenset(reads | ({view.storage for view in changed} - overwrites)),
                overwrites=frozenset(overwrites),
                writes=frozenset(writes),
                drawn_from=drawn_from,
            )
        )

    def _placeholder(self, value: Any) -> Any:
        if self.owns(value):
            return self.view(value)
        # What the code holds may change until the operation is repeated.
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _repeat(self, operation: _Operation, real: dict[int, torch.UntypedStorage]) -> None:
        def present(value: Any) -> Any:
            return self._real(value, real) if isinstance(value, _View) else value

        args, kwargs = tree_map(present, operation.args), tree_map(present, operation.kwargs)
        if operation.drawn_from is not None:
            device, state = operation.drawn_from
            generator = torch.Generator(device)
            generator.set_state(state)
            if "generator" in {argument.name for argument in operation.func._schema.arguments}:
                results = operation.func(*args, **{**kwargs, "generator": generator})
            else:
                results = _with_default_generator(device, state, lambda: operation.func(*args, **kwargs))
        else:
            results = operation.func(*args, **kwargs)
        for view, result in zip(operation.made, tree_flatten(results)[0], strict=True):
            if view is not None:
                real[view.storage] = result.untyped_storage()

    def _real(self, view: _View, real: dict[int, torch.UntypedStorage]) -> Tensor:
        storage, device = self._storages[view.storage]
        if view.storage not in real:
            real[view.storage] = torch.UntypedStorage(storage.nbytes(), device=device)
        tensor = torch.empty(0, dtype=view.dtype, device=real[view.storage].device)
        return tensor.set_(real[view.storage], view.offset, view.size, view.stride)  # type: ignore[call-overload, no-any-return]


class _Disguise(TorchFunctionMode):
    """Lets tensors without values pass for what they will be: `torch.nn.init` skips what is on the meta device."""

    def __init__(self, construction: DeferredConstruction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKED and self._construction.owns(args[0]):
            tensor = args[0]
            if func is _IS_META:
                return False
            if func is _DEVICE:
                return self._construction.device_of(tensor)
            if func is Tensor.__deepcopy__:
                copied = tensor.detach().clone()
                copied = Parameter(copied, tensor.requires_grad) if isinstance(tensor, Parameter) else copied
                args[1][id(tensor)] = copied
                return copied
            return func(self._construction.real([tensor])[0], *args[1:], **kwargs)
        return func(*args, **kwargs)


_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]
_ASKED = {_IS_META, _DEVICE, Tensor.__deepcopy__, Tensor.tolist, Tensor.numpy, Tensor.__array__}


class _Recorder(TorchDispatchMode):
    """Sees every operation in `DeferredConstruction.recording`."""

    def __init__(self, construction: DeferredConstruction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        construction = self._construction
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        if any(type(tensor) not in (Tensor, Parameter) for tensor in tensors):
            return func(*args, **kwargs)
        owned = [tensor for tensor in tensors if construction.owns(tensor)]
        makes = "device" in {argument.name for argument in func._schema.arguments} and func is not _aten._to_copy.default
        if makes and not (owned and kwargs.get("device") is None):
            return self._make(func, args, kwargs)
        if not owned:
            return func(*args, **kwargs)
        return self._change(func, args, kwargs, owned)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor from nothing, or like another: with values if it is small."""
        construction = self._construction
        device = torch.device(kwargs.get("device") or "cpu")
        without = func(*tree_map(_on_meta, args), **{**kwargs, "device": "meta"})
        explicit = device.type == "meta"
        if explicit:
            device = construction.device
        real_kwargs = {**kwargs, "device": device}
        small = sum(r.numel() * r.element_size() for r in tree_flatten(without)[0] if isinstance(r, Tensor)) <= DEFERRED_BYTES
        likes = [value for value in tree_flatten((args, kwargs))[0] if construction.owns(value)]
        if small and not explicit and not likes:
            return func(*args, **kwargs)
        drawn_from = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn_from = _generator_state(kwargs, device)
            func(*_emptied(args, device), **_emptied(real_kwargs, device))
        construction.record(func, args, real_kwargs, without, device, drawn_from, written=[])
        return without

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owned: list[Tensor]) -> Any:
        """Run an operation on something that has no value."""
        construction = self._construction
        written = [
            tensor
            for tensor, argument in _with_schema(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        target = kwargs.get("device")
        leaves = func is _aten._to_copy.default and target is not None and torch.device(target).type != "meta"
        returns_tensors = any("Tensor" in str(result.type) for result in func._schema.returns)
        if leaves or not returns_tensors or any(not construction.owns(tensor) for tensor in written):
            if written and all(construction.owns(tensor) for tensor in written) and not returns_tensors:
                pass  # `_foreach_*_` and the like write, and return nothing
            else:
                return self._run_now(func, args, kwargs, owned)
        device = construction.device_of(owned[0])
        drawn_from = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn_from = _generator_state(kwargs, device)
            if func.overloadpacket in _OVERWRITING:
                func(*_emptied(args, device), **_emptied(kwargs, device))
            else:
                self._run_now(func, args, kwargs, owned, writes=True)
        results = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        construction.record(func, args, kwargs, results, device, drawn_from, written)
        return results

    def _run_now(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owned: list[Tensor], writes: bool = False
    ) -> Any:
        """Give an operation the values it asks for."""
        real = dict(zip(map(id, owned), self._construction.real(owned), strict=True))

        def present(value: Any) -> Any:
            return real.get(id(value), value) if isinstance(value, Tensor) else value

        return func(*tree_map(present, args), **tree_map(present, kwargs))


def _with_schema(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    positional = [argument for argument in func._schema.arguments if not argument.kwarg_only]
    named = {argument.name: argument for argument in func._schema.arguments}
    pairs = [*zip(args, positional, strict=False), *((value, named[name]) for name, value in kwargs.items())]
    for value, argument in pairs:
        for tensor in tree_flatten(value)[0]:
            if isinstance(tensor, Tensor):
                yield tensor, argument


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value


def _emptied(values: Any, device: torch.device) -> Any:
    """Put memory of the same shape in place of tensors: a draw that fills it takes as many numbers."""

    def emptied(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
        return value

    return tree_map(emptied, values)


def _generator_state(kwargs: dict[str, Any], device: torch.device) -> tuple[torch.device, Tensor]:
    generator = kwargs.get("generator")
    if generator is None:
        generator = _default_generator(device)
    return generator.device, generator.get_state()


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _with_default_generator(device: torch.device, state: Tensor, function: Callable[[], Any]) -> Any:
    generator = _default_generator(device)
    before = generator.get_state()
    generator.set_state(state)
    try:
        return function()
    finally:
        generator.set_state(before)


def _tensors_of(module: Module) -> Iterator[Tensor]:
    """Yield the tensors `module` itself holds: parameters, buffers, attributes, and those in lists and dicts."""

    def search(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            for entry in value.values():
                yield from search(entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                yield from search(entry)

    for name, value in vars(module).items():
        if name != "_modules":
            yield from search(value)


def _replace(module: Module, filled: dict[int, Tensor]) -> None:
    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return filled.get(id(value), value)
        if isinstance(value, dict):
            for key, entry in value.items():
                value[key] = replaced(entry)
        elif isinstance(value, list):
            value[:] = [replaced(entry) for entry in value]
        return value

    for name, value in list(vars(module).items()):
        if name != "_modules":
            vars(module)[name] = replaced(value)
