"""Build a module without holding it: free each large tensor while it is built, and compute it again when it is sharded.

While `configure_model` runs, every operation is done as usual. Those that make or change large tensors are logged, with
the state of the random number generator before them, and all but the last few of these tensors give up their memory. A
tensor that has none is computed again, by repeating the operations that it depends on, if an operation uses it, and at
last when its unit is sharded. So ranks need no communication, and draw the numbers that one process draws.

The rule for what stays in memory: what cannot be computed again from nothing, what code reads without an operation of
torch (`numpy()`), and what something other than the module holds.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from lightning_paral.compat.torch.autograd import DisableTorchFunction
from lightning_paral.compat.torch.tensors import (
    TorchDispatchMode,
    schema_of,
    storage_at,
    tree_leaves,
    tree_map,
    without_modes,
)
from lightning_paral.errors import ConfigurationError

DEFERRED_BYTES = 64 * 1024
"""Tensors up to this size stay in memory, because to free them would save little."""

_NUM_RECENT = 4
"""How many large tensors have memory at a time; initialization uses one, or a few, again and again."""

_aten = torch.ops.aten
_OVERWRITING = {
    _aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_, _aten.random_,
}  # fmt: skip
"""In-place operations whose result does not depend on the previous values, which are then not computed."""

_READING_MEMORY = {
    Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage,
    Tensor.__dlpack__, Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.share_memory_,
}  # fmt: skip


class DeferredConstruction:
    """The large tensors that a module got inside `recording()`, and how to compute them.

    Args:
        device: the default device of new tensors, and of the generator that draws their values.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._log = _Log()
        self._waiting: dict[int, tuple[Tensor, _View | Parameter]] = {}
        """Placeholders on the meta device by their `id`, and where the values come from."""
        self._shared: dict[int, Tensor] = {}

    @contextmanager
    def recording(self, module: Module | None) -> Iterator[None]:
        """Free large tensors that the block makes; on exit, those of `module` are on the meta device.

        Nothing is deferred if `module` is `None`, as in `trainer.init_module()`.

        Large parameters with values that cannot be computed again, such as those that `from_pretrained` maps from
        files, wait as they are. On the meta device, a conversion of the module to another dtype needs no memory for
        them.

        Raises:
            ConfigurationError: the block made parameters on the meta device, which have no values.
        """
        if module is None:
            yield
            return
        before = set(module.parameters())
        recorder = _Recorder(self._log)
        try:
            with self._device, _KeepRead(recorder), recorder:
                yield
        finally:
            self._replace_with_placeholders(module, before)
            recorder.free_all_but(0)
            self._keep_what_others_hold(recorder)
        for name, parameter in module.named_parameters():
            if parameter.is_meta and parameter not in before and id(parameter) not in self._waiting:
                raise ConfigurationError(
                    f"{name} of {type(module).__name__} is on the meta device at the end of configure_model, so it has "
                    "no values. Build it without torch.device('meta'): large tensors do not stay in memory while "
                    "configure_model runs."
                )

    def _replace_with_placeholders(self, module: Module, before: set[Parameter]) -> None:
        done: dict[int, tuple[Tensor, Tensor]] = {}  # refers to the tensors, so that no other one gets the same `id`

        def replaced(tensor: Tensor) -> Tensor:
            source: _View | Parameter
            if id(tensor) in done:
                return done[id(tensor)][1]
            if type(tensor) not in (Tensor, Parameter) or not _is_view(tensor):
                return tensor
            if self._log.owns(tensor):
                source = _View.of(tensor)
            elif isinstance(tensor, Parameter) and tensor not in before and tensor.nbytes > DEFERRED_BYTES:
                source = tensor
            else:
                return tensor
            meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            placeholder = _in_place_of(tensor, meta)
            done[id(tensor)] = tensor, placeholder
            self._waiting[id(placeholder)] = placeholder, source
            return placeholder

        for part in module.modules():
            _replace(part, replaced)

    def _keep_what_others_hold(self, recorder: "_Recorder") -> None:
        if self._log.owned:
            gc.collect()
        for key in self._log.owned:
            if (storage := storage_at(key.cdata)) is not None:
                recorder.give_memory({key: storage})

    @property
    def is_empty(self) -> bool:
        """Whether no tensor is left to materialize."""
        return not self._waiting

    def fill(self, modules: Iterable[Module]) -> None:
        """Materialize the deferred tensors that `modules` hold directly; those of submodules stay deferred.

        Pass all modules that share a parameter in the same call: it is materialized once.
        """
        modules, found = list(modules), dict[int, tuple[Tensor, _View | Parameter]]()

        def note(tensor: Tensor) -> Tensor:
            if id(tensor) in self._waiting:
                found[id(tensor)] = self._waiting.pop(id(tensor))
            return tensor

        for module in modules:
            _replace(module, note)
        values = iter(self._log.tensors([source for _, source in found.values() if isinstance(source, _View)]))
        filled = dict(self._shared)
        for key, (placeholder, source) in found.items():
            # `module.bfloat16()` may have been called in between.
            if isinstance(source, Parameter):
                source.data = source.data.to(placeholder.dtype)
                filled[key] = source.requires_grad_(placeholder.requires_grad)
            else:
                filled[key] = _in_place_of(placeholder, next(values).to(placeholder.dtype))
            if not isinstance(placeholder, Parameter):
                self._shared[key] = filled[key]  # units may share buffers, but never parameters
        for module in modules:
            _replace(module, lambda tensor: filled.get(id(tensor), tensor))


@dataclass(frozen=True)
class _View:
    """Describes a tensor as a view of a storage."""

    storage: StorageWeakRef
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_View":
        geometry = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return cls(_key_of(tensor), tensor.dtype, tensor.device, *geometry)

    def tensor(self, real: dict[StorageWeakRef, UntypedStorage]) -> Tensor:
        """Return a new tensor on a storage in `real`, to which one is added for an operation that overwrites it."""
        if self.storage not in real:
            empty = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
            real[self.storage] = empty.untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(real[self.storage], self.offset, self.size, self.stride)


@dataclass(frozen=True, kw_only=True)
class _Operation:
    func: Any
    args: Any
    kwargs: Any
    outputs: list[StorageWeakRef | None]
    """The new storage of each result; `None` if it has no new one."""
    reads: set[StorageWeakRef]
    """Storages whose previous values the operation needs."""
    overwrites: set[StorageWeakRef]
    """Storages whose previous values the operation replaces completely."""
    writes: set[StorageWeakRef]
    drawn_from: tuple[Generator, Tensor] | None
    """For random operations, the generator and its state before the operation."""
    default_dtype: torch.dtype
    """With bf16-true it is bf16 while the module is built, and another one afterwards."""

    def repeat(self, real: dict[StorageWeakRef, UntypedStorage]) -> None:
        """Do the operation again, on the storages in `real`, to which it adds new ones."""

        def present(value: Any) -> Any:
            return value.tensor(real) if isinstance(value, _View) else value

        args, kwargs = tree_map(present, self.args), tree_map(present, self.kwargs)
        with ExitStack() as undo:
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default_dtype)
            if self.drawn_from is not None:
                generator, state = self.drawn_from
                undo.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            results = self.func(*args, **kwargs)
        for key, result in zip(self.outputs, tree_leaves(results), strict=True):
            if key is not None:
                real[key] = result.untyped_storage()


class _Log:
    """Operations on storages that can be computed again, in order."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self.owned: dict[StorageWeakRef, int] = {}
        """The size in bytes of each storage whose values the log can compute."""

    def owns(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and _key_of(tensor) in self.owned

    def storages(self, keys: Iterable[StorageWeakRef]) -> dict[StorageWeakRef, UntypedStorage]:
        """Return new storages with the values of `keys`, and of others that were needed to compute them."""
        needed = set(keys)
        path = []
        for operation in reversed(self.operations):
            if not needed.isdisjoint(operation.writes):
                path.append(operation)
                needed = (needed - operation.overwrites) | operation.reads
        real: dict[StorageWeakRef, UntypedStorage] = {}
        with torch.no_grad(), DisableTorchFunction(), without_modes():
            for operation in reversed(path):
                operation.repeat(real)
        return real

    def tensors(self, views: list[_View]) -> list[Tensor]:
        """Return new tensors with the values of `views`. Those that shared memory share it again."""
        real = self.storages(view.storage for view in views)
        return [view.tensor(real) for view in views]


class _Recorder(TorchDispatchMode):
    """Does operations as usual, logs those on large tensors, and frees the tensors that were not used recently."""

    def __init__(self, log: _Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._recent: dict[StorageWeakRef, UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(each.__torch_dispatch__ != Tensor.__torch_dispatch__ for each in types):
            return NotImplemented  # a DTensor, for example: the operations on the tensors inside come here in turn
        kwargs = kwargs or {}
        inputs = _tensors_in((args, kwargs))
        owned = {_key_of(tensor): _storage_of(tensor) for tensor in inputs if self._log.owns(tensor)}
        overwritten = self._overwritten(func, inputs)
        self.give_memory({key: storage for key, storage in owned.items() if key not in overwritten})
        for key in overwritten:
            owned[key].resize_(self._log.owned[key])
        drawn_from = _generator_of(func, inputs, kwargs)
        can_log = func.namespace == "aten" and all(map(self._can_log, inputs))
        results = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        changed = {_key_of(tensor) for tensor in written if self._log.owns(tensor)}
        if can_log and all(map(self._log.owns, written)):
            outputs = [self._own_if_new(result, inputs) for result in tree_leaves(results)]
            new = {key for key in outputs if key is not None}
            if new or changed:
                operation = _Operation(
                    func=func,
                    args=tree_map(self._logged, args),
                    kwargs=tree_map(self._logged, kwargs),
                    outputs=outputs,
                    reads=owned.keys() - overwritten,
                    overwrites=new | overwritten,
                    writes=new | changed,
                    drawn_from=drawn_from,
                    default_dtype=torch.get_default_dtype(),
                )
                self._log.operations.append(operation)
        else:
            self._keep(changed)
        self._free_others([*inputs, *_tensors_in(results)])
        return results

    def keep(self, tensor: Tensor) -> None:
        """Give `tensor` memory, and never free it."""
        if self._log.owns(tensor):
            self.give_memory({_key_of(tensor): _storage_of(tensor)})
            self._keep([_key_of(tensor)])

    def _keep(self, keys: Iterable[StorageWeakRef]) -> None:
        for key in keys:
            del self._log.owned[key]
            self._recent.pop(key, None)

    def give_memory(self, storages: dict[StorageWeakRef, UntypedStorage]) -> None:
        """Compute the values of those of `storages` that have none."""
        free = {key: storage for key, storage in storages.items() if storage.nbytes() == 0}
        if free:
            values = self._log.storages(free)
            with without_modes():
                for key, storage in free.items():
                    storage.resize_(values[key].nbytes())
                    storage.copy_(values[key])

    def _free_others(self, used: list[Tensor]) -> None:
        for tensor in used:
            if self._log.owns(tensor):
                key = _key_of(tensor)
                self._recent.pop(key, None)
                self._recent[key] = _storage_of(tensor)
                self._log.owned[key] = self._recent[key].nbytes()
        self.free_all_but(_NUM_RECENT)

    def free_all_but(self, num_recent: int) -> None:
        """Free the tensors that have memory, except the last `num_recent`."""
        for key in list(self._recent)[: max(0, len(self._recent) - num_recent)]:
            self._recent.pop(key).resize_(0)

    def _overwritten(self, func: Any, inputs: list[Tensor]) -> set[StorageWeakRef]:
        """Return the storage whose values the operation replaces without a use of the previous ones."""
        if func.overloadpacket not in _OVERWRITING or not self._log.owns(inputs[0]):
            return set()
        key = _key_of(inputs[0])
        is_whole = inputs[0].is_contiguous() and inputs[0].nbytes == self._log.owned[key]
        return {key} if is_whole and not _shares(key, inputs[1:]) else set()

    def _can_log(self, tensor: Tensor) -> bool:
        has_no_values = tensor.is_meta or self._log.owns(tensor)
        return _is_view(tensor) and (has_no_values or tensor.nbytes <= DEFERRED_BYTES)

    def _logged(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # The caller may change a small tensor before the operation is repeated.
        return _View.of(value) if self._log.owns(value) else value.detach().clone()

    def _own_if_new(self, result: Any, inputs: list[Tensor]) -> StorageWeakRef | None:
        """Return the storage of `result` if it is large and new. The log can compute its values from now on."""
        if not isinstance(result, Tensor) or result.layout is not torch.strided or result.is_meta:
            return None
        key, num_bytes = _key_of(result), _storage_of(result).nbytes()
        if num_bytes <= DEFERRED_BYTES or _shares(key, inputs):
            return None
        self._log.owned[key] = num_bytes
        return key


class _KeepRead(TorchFunctionMode):
    """Keeps tensors in memory that code reads without an operation, because it may read them later, too."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READING_MEMORY and type(args[0]) in (Tensor, Parameter):
            self._recorder.keep(args[0])
        return func(*args, **(kwargs or {}))


def _storage_of(tensor: Tensor) -> UntypedStorage:
    with DisableTorchFunction():
        return tensor.untyped_storage()


def _key_of(tensor: Tensor) -> StorageWeakRef:
    """Return what identifies the storage of `tensor`, also after its end: a weak reference keeps the address in use."""
    return StorageWeakRef(_storage_of(tensor))  # type: ignore[no-untyped-call]


def _is_view(tensor: Tensor) -> bool:
    """Return whether a `_View` can describe `tensor`: it is neither sparse nor conjugated only when it is read."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _shares(key: StorageWeakRef, tensors: list[Tensor]) -> bool:
    return any(tensor.layout is torch.strided and _key_of(tensor) == key for tensor in tensors)


def _tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    arguments = schema_of(func).arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    changed = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
    return _tensors_in([given.get(name) for name in changed])


def _generator_of(func: Any, inputs: list[Tensor], kwargs: dict[str, Any]) -> tuple[Generator, Tensor] | None:
    """Return the generator that a random operation draws from, and its state; `None` for other operations."""
    device = torch.device(kwargs.get("device") or (inputs[0].device if inputs else "cpu"))
    if torch.Tag.nondeterministic_seeded not in func.tags or device.type == "meta":
        return None
    generator = kwargs.get("generator")
    if generator is None and device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    generator = torch.default_generator if generator is None else generator
    return generator, generator.get_state()


def _in_place_of(tensor: Tensor, value: Tensor) -> Tensor:
    """Return `value` as what `tensor` is, a parameter with its attributes or a tensor."""
    if not isinstance(tensor, Parameter):
        return value
    parameter = Parameter(value, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def _replace(module: Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each tensor that `module` holds directly, as an attribute or in lists and dicts, by `change(tensor)`."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if isinstance(value, dict):
            for key, entry in value.items():
                value[key] = changed(entry)
        elif isinstance(value, list):
            value[:] = [changed(entry) for entry in value]
        return value

    for name, value in list(vars(module).items()):
        if name != "_modules":
            vars(module)[name] = changed(value)
