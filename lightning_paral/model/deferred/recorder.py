"""Torch modes that create large tensors on the meta device, and the log from which their values are computed later."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_paral.compat.torch.tensors import (
    TorchDispatchMode,
    identity_of,
    schema_of,
    tree_leaves,
    tree_map_only,
)

DEFERRED_BYTES = 64 * 1024
"""Tensors up to this size are not deferred, because that would save little, and code often reads their values."""

_to_copy = torch.ops.aten._to_copy.default
_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_aten = torch.ops.aten
OVERWRITING = {
    _aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_, _aten.random_,
}  # fmt: skip
"""In-place operations whose result does not depend on the previous values."""


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """An operation. Storages are named by their identity; tensors that share memory share a storage."""

    func: Any
    args: Any
    kwargs: Any
    outputs: tuple[int | None, ...]
    """For each result, its storage if that is new, otherwise `None`."""
    reads: set[int]
    """Storages whose previous values the operation needs."""
    overwrites: set[int]
    """Storages whose previous values the operation replaces completely."""
    writes: set[int]
    """Storages that the operation creates or writes to."""
    drawn_from: tuple[torch.device, Tensor] | None
    """For random operations, the generator's device and its state before the operation."""
    default_dtype: torch.dtype


class OpLog:
    """Operations on deferred tensors, in order."""

    def __init__(self) -> None:
        self.is_repeating = False
        """Whether operations run that must not be recorded."""
        self._operations: list[_Operation] = []
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}

    def owns(self, value: Any) -> bool:
        """Return whether `value` is a deferred tensor of this log."""
        try:
            return isinstance(value, Tensor) and _storage_of(value) in self._storages
        except RuntimeError:  # it has no storage, as a sparse tensor
            return False

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device that `tensor` will be materialized on."""
        return self._storages[_storage_of(tensor)][1]

    def record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        results: Any,
        device: torch.device,
        drawn_from: tuple[torch.device, Tensor] | None,
        written: list[Tensor],
    ) -> None:
        """Log an operation with its meta `results` and the tensors that it has `written` in place."""
        found = tree_leaves(results)
        outputs = [_storage_of(r) if isinstance(r, Tensor) and not self.owns(r) else None for r in found]
        new = {storage: result.untyped_storage() for storage, result in zip(outputs, found, strict=True) if storage}
        self._storages.update((storage, (memory, device)) for storage, memory in new.items())
        changed = {_storage_of(tensor): tensor for tensor in written}
        if not new and not changed:
            return  # the operation returned views, which can be materialized from their storages
        overwrites = set(new)
        if func.overloadpacket in OVERWRITING:
            overwrites |= {
                each for each, tensor in changed.items() if tensor.nbytes == self._storages[each][0].nbytes()
            }
        inputs = {_storage_of(value) for value in tree_leaves((args, kwargs)) if self.owns(value)}
        self._operations.append(
            _Operation(
                func=func,
                args=tree_map_only(Tensor, self._kept, args),
                kwargs=tree_map_only(Tensor, self._kept, kwargs),
                outputs=tuple(outputs),
                reads=inputs - overwrites,
                overwrites=overwrites,
                writes={*new, *changed},
                drawn_from=drawn_from,
                default_dtype=torch.get_default_dtype(),
            )
        )

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return an argument as it is now; the caller may change its values or, of a deferred one, its `data`."""
        return tensor.detach() if self.owns(tensor) else tensor.detach().clone()

    def materialize(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return real tensors for deferred ones; repeat the operations that produced them, and no others."""
        needed = set(map(_storage_of, tensors))
        path = []
        for operation in reversed(self._operations):
            if not needed.isdisjoint(operation.writes):
                path.append(operation)
                needed = (needed - operation.overwrites) | operation.reads
        real: dict[int, torch.UntypedStorage] = {}
        before, self.is_repeating = self.is_repeating, True
        try:
            with torch.no_grad():
                for operation in reversed(path):
                    self._repeat(operation, real)
                return [self._real(tensor, real) for tensor in tensors]
        finally:
            self.is_repeating = before

    def _repeat(self, operation: _Operation, real: dict[int, torch.UntypedStorage]) -> None:
        def present(value: Tensor) -> Tensor:
            return self._real(value, real) if self.owns(value) else value

        args, kwargs = tree_map_only(Tensor, present, (operation.args, operation.kwargs))
        before = torch.get_default_dtype()
        torch.set_default_dtype(operation.default_dtype)  # with bf16-true it was bf16 while the module was built
        try:
            if operation.drawn_from is None:
                results = operation.func(*args, **kwargs)
            else:
                results = _draw_again(operation.func, args, kwargs, *operation.drawn_from)
        finally:
            torch.set_default_dtype(before)
        for storage, result in zip(operation.outputs, tree_leaves(results), strict=True):
            if storage is not None:
                real[storage] = result.untyped_storage()

    def _real(self, tensor: Tensor, real: dict[int, torch.UntypedStorage]) -> Tensor:
        key = _storage_of(tensor)
        memory, device = self._storages[key]
        if key not in real:
            real[key] = torch.empty(memory.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype, device=real[key].device)
        return made.set_(real[key], tensor.storage_offset(), tensor.size(), tensor.stride())


def _storage_of(tensor: Tensor) -> int:
    return identity_of(tensor.untyped_storage())


def generator_state(generator: torch.Generator | None, device: torch.device) -> tuple[torch.device, Tensor]:
    """Return the device and the state of `generator`, or of the default generator of `device` if it is `None`."""
    if generator is not None:
        return generator.device, generator.get_state()
    return device, torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _draw_again(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device, state: Tensor) -> Any:
    """Call a random operation with the default generator in `state`, whichever generator it was called with."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng([device] if is_cuda else []):
        torch.cuda.set_rng_state(state, device) if is_cuda else torch.set_rng_state(state)
        return func(*args, **(kwargs | {"generator": None} if "generator" in kwargs else kwargs))


# The modes


class MetaDisguise(TorchFunctionMode):
    """Makes deferred tensors report their future device, because `torch.nn.init` skips tensors on the meta device."""

    def __init__(self, log: OpLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        log, kwargs = self._log, kwargs or {}
        if log.is_repeating:
            return func(*args, **kwargs)
        if func == _SET_DATA and log.owns(args[0]) != log.owns(args[1]):
            return _set_data(*args)
        if func == _IS_META and log.owns(args[0]):
            return False
        if func == _DEVICE and log.owns(args[0]):
            return log.device_of(args[0])
        if func is Tensor.__deepcopy__ and log.owns(args[0]):
            return _deep_copy(*args)
        if func in _READING and log.owns(args[0]):
            return func(log.materialize([args[0]])[0], *args[1:], **kwargs)
        return func(*args, **kwargs)


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """Assign `tensor.data = value` if only one of the two is on the meta device, which torch refuses to do."""
    other = Parameter(value.detach(), tensor.requires_grad) if isinstance(tensor, Parameter) else value.detach()
    vars(other).update(vars(tensor))
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def _deep_copy(tensor: Tensor, memo: dict[int, Tensor]) -> Tensor:
    """Copy `tensor` by operations: torch's own method copies the storage, which the recorder does not see."""
    copied = tensor.detach().clone()
    memo[id(tensor)] = Parameter(copied, tensor.requires_grad) if isinstance(tensor, Parameter) else copied
    return memo[id(tensor)]


class Recorder(TorchDispatchMode):
    """Runs operations on large tensors on the meta device and logs them.

    If code reads values of such a tensor, it is materialized for this purpose.
    """

    def __init__(self, log: OpLog, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._log.is_repeating:
            return func(*args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if any(type(tensor) not in (Tensor, Parameter) for tensor in tensors):
            return func(*args, **kwargs)
        owned = [tensor for tensor in tensors if self._log.owns(tensor)]
        makes = func is not _to_copy and any(argument.name == "device" for argument in schema_of(func).arguments)
        if makes and not (owned and kwargs.get("device") is None):
            return self._make(func, args, kwargs, has_template=bool(owned))
        if owned:
            return self._change(func, args, kwargs, owned)
        return func(*args, **kwargs)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_template: bool) -> Any:
        """Run an operation that creates a tensor; defer it unless the tensor is small."""
        device = torch.device(kwargs.get("device") or "cpu")
        if is_placeholder(device):
            return func(*args, **kwargs)
        meta = func(*_on_meta(args), **{**kwargs, "device": "meta"})
        if device.type == "meta":
            device = self._device
        elif not has_template and sum(part.nbytes for part in tree_leaves(meta)) <= DEFERRED_BYTES:
            return func(*args, **kwargs)
        kwargs = {**kwargs, "device": device}
        drawn_from = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn_from = generator_state(kwargs.get("generator"), device)
            _draw(func, args, kwargs, device)
        self._log.record(func, args, kwargs, meta, device, drawn_from, written=[])
        return meta

    def _change(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owned: list[Tensor]) -> Any:
        """Run an operation on deferred tensors."""
        written = list(_written(func, args, kwargs))
        if self._needs_values(func, kwargs, written):
            return self._run_now(func, args, kwargs, owned)
        device = self._log.device_of(owned[0])
        drawn_from = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn_from = generator_state(kwargs.get("generator"), device)
            if func.overloadpacket in OVERWRITING:
                _draw(func, args, kwargs, device)
            else:
                self._run_now(func, args, kwargs, owned)
        results = func(*_on_meta(args), **_on_meta(kwargs))
        self._log.record(func, args, kwargs, results, device, drawn_from, written)
        return results

    def _needs_values(self, func: Any, kwargs: dict[str, Any], written: list[Tensor]) -> bool:
        if any(not self._log.owns(tensor) for tensor in written):
            return True  # the operation writes to a real tensor
        target = kwargs.get("device")
        if func is _to_copy and target is not None and torch.device(target).type != "meta":
            return True
        returns_tensors = any("Tensor" in str(result.type) for result in schema_of(func).returns)
        return not returns_tensors and not written

    def _run_now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owned: list[Tensor]) -> Any:
        real = dict(zip(map(id, owned), self._log.materialize(owned), strict=True))
        args, kwargs = tree_map_only(Tensor, lambda tensor: real.get(id(tensor), tensor), (args, kwargs))
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place."""
    arguments = schema_of(func).arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    for argument in arguments:
        if argument.name in given and argument.alias_info is not None and argument.alias_info.is_write:
            yield from (tensor for tensor in tree_leaves(given[argument.name]) if isinstance(tensor, Tensor))


def _on_meta(values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to("meta"), values)


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
    """Run a random operation on memory without values: filling it draws the same random numbers."""

    def uninitialized(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    args, kwargs = tree_map_only(Tensor, uninitialized, (args, kwargs))
    func(*args, **kwargs)


# What `from_pretrained` of transformers creates


def is_loading_pretrained() -> bool:
    """Return whether `PreTrainedModel.from_pretrained` is on the call stack.

    It searches the stack because a patch would come too late for a `configure_model` that imports transformers itself,
    and because runs that do not use transformers should not import it.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "from_pretrained" and frame.f_globals["__name__"] == "transformers.modeling_utils":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_placeholder(device: torch.device) -> bool:
    """Return whether a tensor created on `device` now is a placeholder that `from_pretrained` will replace."""
    return device.type == "meta" and is_loading_pretrained()


def is_pretrained(parameter: Parameter) -> bool:
    """Return whether `from_pretrained` has read `parameter` from a file."""
    return bool(getattr(parameter, "_is_hf_initialized", False))
