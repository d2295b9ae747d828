"""Torch modes that create large tensors on the meta device, and log the operations that compute their values later."""

import sys
import traceback
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

_IS_META, _DEVICE = Tensor.is_meta.__get__, Tensor.device.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_aten = torch.ops.aten
_to_copy = _aten._to_copy.default
_OVERWRITING = {
    _aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_, _aten.random_,
}  # fmt: skip
"""In-place operations whose result does not depend on the previous values."""


_State = tuple[torch.device, Tensor]
"""The device and the state of a random generator before an operation."""


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """An operation. Storages are named by their identity; tensors that share memory share a storage."""

    func: Any
    given: tuple[Any, dict[str, Any]]
    """Its positional and keyword arguments."""
    outputs: tuple[int | None, ...]
    """For each result, its storage if that is new, otherwise `None`."""
    reads: set[int]
    """Storages whose previous values the operation needs."""
    overwrites: set[int]
    """Storages whose previous values the operation replaces completely."""
    writes: set[int]
    """Storages that the operation creates or writes to."""
    drawn_from: _State | None
    """For random operations."""
    default_dtype: torch.dtype


class Recorder(TorchDispatchMode):
    """Runs operations on large tensors on the meta device and logs them.

    If code reads values of such a tensor, it is materialized for this purpose.

    Args:
        device: where tensors are materialized that code creates on the meta device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._operations: list[_Operation] = []
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
        """The storages of deferred tensors, and where they are materialized."""

    def owns(self, value: Any) -> bool:
        """Return whether `value` is a deferred tensor of this recorder."""
        try:
            return isinstance(value, Tensor) and _storage_of(value) in self._storages
        except RuntimeError:  # it has no storage, as a sparse tensor
            return False

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device that `tensor`, a deferred one, will be materialized on."""
        return self._storages[_storage_of(tensor)][1]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        owned = [tensor for tensor in tensors if self.owns(tensor)]
        if any(type(tensor) not in (Tensor, Parameter) for tensor in tensors):
            return func(*args, **kwargs)
        takes_device = func is not _to_copy and any(each.name == "device" for each in schema_of(func).arguments)
        makes = takes_device and not (owned and kwargs.get("device") is None)
        if makes:
            device = self._device_of_new(func, args, kwargs, is_derived=bool(owned))
        else:
            device = self.device_of(owned[0]) if owned else None
        if device is None:
            return func(*args, **kwargs)
        on_meta = {"device": "meta"} if makes else {}
        kwargs |= {"device": device} if makes else {}
        written = list(_written(func, args, kwargs))
        if self._needs_values(func, kwargs, written, makes=makes):
            return self._run_now(func, args, kwargs, owned)
        drawn_from = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            drawn_from = _generator_state(kwargs.get("generator"), device)
            self._run_now(func, args, kwargs, owned)  # so that later operations draw what they would without deferral
        results = func(*_to_meta(args), **_to_meta(kwargs) | on_meta)
        self._record(func, (args, kwargs), results, device, drawn_from, written)
        return results

    def _device_of_new(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_derived: bool
    ) -> torch.device | None:
        """Return where what `func` creates is materialized later; `None` if it is created at once."""
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type == "meta":
            return None if is_loading_pretrained() else self._device
        made = func(*_to_meta(args), **{**kwargs, "device": "meta"})
        is_small = sum(part.nbytes for part in tree_leaves(made)) <= DEFERRED_BYTES
        return None if is_small and not is_derived else device

    def _needs_values(self, func: Any, kwargs: dict[str, Any], written: list[Tensor], *, makes: bool) -> bool:
        if any(not self.owns(tensor) for tensor in written):
            return True  # the operation writes to a real tensor
        target = kwargs.get("device")
        if func is _to_copy and target is not None and torch.device(target).type != "meta":
            return True
        returns_tensors = any("Tensor" in str(result.type) for result in schema_of(func).returns)
        return not makes and not returns_tensors and not written

    def _run_now(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owned: list[Tensor]) -> Any:
        if func.overloadpacket in _OVERWRITING and torch.Tag.nondeterministic_seeded in func.tags:
            values = [
                torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device=self.device_of(each))
                for each in owned
            ]
        else:
            values = self.materialize(owned)
        real = dict(zip(map(id, owned), values, strict=True))
        args, kwargs = tree_map_only(Tensor, lambda tensor: real.get(id(tensor), tensor), (args, kwargs))
        return func(*args, **kwargs)

    # The log

    def _record(
        self, func: Any, given: Any, results: Any, device: Any, drawn_from: _State | None, written: list[Tensor]
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
        if func.overloadpacket in _OVERWRITING:
            overwrites |= {
                each for each, tensor in changed.items() if tensor.nbytes == self._storages[each][0].nbytes()
            }
        inputs = {_storage_of(value) for value in tree_leaves(given) if self.owns(value)}
        self._operations.append(
            _Operation(
                func=func,
                given=tree_map_only(Tensor, self._kept, given),
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

    @torch.no_grad()
    def materialize(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return real tensors for deferred ones; repeat the operations that produced them, and no others."""
        needed = set(map(_storage_of, tensors))
        path = []
        for operation in reversed(self._operations):
            if not needed.isdisjoint(operation.writes):
                path.append(operation)
                needed = (needed - operation.overwrites) | operation.reads
        real: dict[int, torch.UntypedStorage] = {}
        for operation in reversed(path):
            self._repeat(operation, real)
        return [self._real(tensor, real) for tensor in tensors]

    def _repeat(self, operation: _Operation, real: dict[int, torch.UntypedStorage]) -> None:
        def present(value: Tensor) -> Tensor:
            return self._real(value, real) if self.owns(value) else value

        args, kwargs = tree_map_only(Tensor, present, operation.given)
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
        return torch.empty(0, dtype=tensor.dtype, device=device).set_(
            real[key], tensor.storage_offset(), tensor.size(), tensor.stride()
        )


class MetaDisguise(TorchFunctionMode):
    """Makes deferred tensors report their future device, because `torch.nn.init` skips tensors on the meta device.

    Args:
        recorder: the recorder of the deferred tensors.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        owns = self._recorder.owns
        if func == _IS_META and owns(args[0]):
            return False
        if func == _DEVICE and owns(args[0]):
            return self._recorder.device_of(args[0])
        if func is Tensor.__deepcopy__ and owns(args[0]) and not isinstance(args[0], Parameter):
            # torch would copy the storage, which the recorder does not see.
            return args[1].setdefault(id(args[0]), args[0].detach().clone())
        if func == _SET_DATA and owns(args[0]) != owns(args[1]):
            return _set_data(*args)
        return func(*args, **kwargs or {})


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """Assign `tensor.data = value` if only one of the two is on the meta device, which torch refuses to do."""
    other = Parameter(value.detach(), tensor.requires_grad) if isinstance(tensor, Parameter) else value.detach()
    vars(other).update(vars(tensor))
    torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]


def _storage_of(tensor: Tensor) -> int:
    return identity_of(tensor.untyped_storage())


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation changes in place."""
    arguments = schema_of(func).arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    for argument in arguments:
        if argument.name in given and argument.alias_info is not None and argument.alias_info.is_write:
            yield from (tensor for tensor in tree_leaves(given[argument.name]) if isinstance(tensor, Tensor))


def _to_meta(values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), values)


def _generator_state(generator: torch.Generator | None, device: torch.device) -> _State:
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


# What `from_pretrained` of transformers creates


def is_loading_pretrained() -> bool:
    """Return whether `PreTrainedModel.from_pretrained` is on the call stack: meta tensors are then its placeholders.

    It searches the stack because a patch would come too late for a `configure_model` that imports transformers itself,
    and because runs that do not use transformers should not import it.
    """
    return "transformers.modeling_utils" in sys.modules and any(
        frame.f_code.co_name == "from_pretrained" and frame.f_globals["__name__"] == "transformers.modeling_utils"
        for frame, _ in traceback.walk_stack(None)
    )


def is_pretrained(parameter: Parameter) -> bool:
    """Return whether `from_pretrained` has read `parameter` from a file."""
    return bool(getattr(parameter, "_is_hf_initialized", False))
