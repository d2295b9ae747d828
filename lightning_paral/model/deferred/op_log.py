"""A log of operations on meta tensors, from which any of these tensors can be materialized."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_paral.compat.torch.autograd import DisableTorchFunction
from lightning_paral.compat.torch.tensors import identity_of, schema_of, tree_flatten, tree_map, without_modes

_aten = torch.ops.aten
OVERWRITING = {
    _aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_, _aten.random_,
}  # fmt: skip
"""In-place operations whose result does not depend on the previous values."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Describes a tensor as a view of a storage. Tensors that share memory share a storage."""

    storage: int
    """The identity of the storage."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        """Return the description of `tensor`."""
        return cls(
            storage=identity_of(tensor.untyped_storage()),
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
        )

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the tensor's elements."""
        return self.size.numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class _Operation:
    func: Any
    args: Any
    kwargs: Any
    outputs: tuple[View | None, ...]
    """For each result, its view if it has a new storage, otherwise `None`."""
    reads: frozenset[int]
    """Storages whose previous values the operation needs."""
    overwrites: frozenset[int]
    """Storages whose previous values the operation replaces completely."""
    writes: frozenset[int]
    """Storages that the operation creates or writes to."""
    drawn_from: tuple[torch.device, Tensor] | None
    """For random operations, the generator's device and its state before the operation."""
    default_dtype: torch.dtype


class OpLog:
    """Operations on deferred tensors, in order."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}

    def owns(self, value: Any) -> bool:
        """Return whether `value` is a deferred tensor of this log."""
        if not isinstance(value, Tensor):
            return False
        with DisableTorchFunction():
            return value.is_meta and identity_of(value.untyped_storage()) in self._storages

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device that `tensor` will be materialized on."""
        return self._storages[identity_of(tensor.untyped_storage())][1]

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
        outputs = tuple(
            View.of(result) if isinstance(result, Tensor) and not self.owns(result) else None
            for result in tree_flatten(results)[0]
        )
        for result in tree_flatten(results)[0]:
            if isinstance(result, Tensor) and not self.owns(result):
                storage = result.untyped_storage()
                self._storages[identity_of(storage)] = (storage, device)
        new = {view.storage for view in outputs if view}
        changed = [View.of(tensor) for tensor in written]
        if not new and not changed:
            return  # the operation returned views, which can be materialized from their storages
        overwrites = set(new)
        if func.overloadpacket in OVERWRITING:
            overwrites |= {
                view.storage for view in changed if view.num_bytes == self._storages[view.storage][0].nbytes()
            }
        inputs = {View.of(value).storage for value in tree_flatten((args, kwargs))[0] if self.owns(value)}
        self._operations.append(
            _Operation(
                func=func,
                args=tree_map(self._placeholder, args),
                kwargs=tree_map(self._placeholder, kwargs),
                outputs=outputs,
                reads=frozenset(inputs - overwrites),
                overwrites=frozenset(overwrites),
                writes=frozenset(new | {view.storage for view in changed}),
                drawn_from=drawn_from,
                default_dtype=torch.get_default_dtype(),
            )
        )

    def materialize(self, views: list[View]) -> list[Tensor]:
        """Return real tensors for `views`; repeat the operations that produced them, and no others."""
        needed = {view.storage for view in views}
        path = []
        for operation in reversed(self._operations):
            if not needed.isdisjoint(operation.writes):
                path.append(operation)
                needed = (needed - operation.overwrites) | operation.reads
        real: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), DisableTorchFunction(), without_modes():
            for operation in reversed(path):
                self._repeat(operation, real)
            return [self._real(view, real) for view in views]

    def _placeholder(self, value: Any) -> Any:
        if self.owns(value):
            return View.of(value)
        # The caller may change a real tensor before the operation is repeated.
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _repeat(self, operation: _Operation, real: dict[int, torch.UntypedStorage]) -> None:
        def present(value: Any) -> Any:
            return self._real(value, real) if isinstance(value, View) else value

        args, kwargs = tree_map(present, operation.args), tree_map(present, operation.kwargs)
        before = torch.get_default_dtype()
        torch.set_default_dtype(operation.default_dtype)  # with bf16-true it was bf16 while the module was built
        try:
            if operation.drawn_from is None:
                results = operation.func(*args, **kwargs)
            else:
                results = _draw_again(operation.func, args, kwargs, *operation.drawn_from)
        finally:
            torch.set_default_dtype(before)
        for view, result in zip(operation.outputs, tree_flatten(results)[0], strict=True):
            if view is not None:
                real[view.storage] = result.untyped_storage()

    def _real(self, view: View, real: dict[int, torch.UntypedStorage]) -> Tensor:
        storage, device = self._storages[view.storage]
        if view.storage not in real:
            real[view.storage] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
        tensor = torch.empty(0, dtype=view.dtype, device=real[view.storage].device)
        return tensor.set_(real[view.storage], view.offset, view.size, view.stride)


def generator_state(generator: torch.Generator | None, device: torch.device) -> tuple[torch.device, Tensor]:
    """Return the device and the state of `generator`, or of the default generator of `device` if it is `None`."""
    generator = _default_generator(device) if generator is None else generator
    return generator.device, generator.get_state()


def _draw_again(func: Any, args: Any, kwargs: Any, device: torch.device, state: Tensor) -> Any:
    if "generator" in {argument.name for argument in schema_of(func).arguments}:
        generator = torch.Generator(device)
        generator.set_state(state)
        return func(*args, **{**kwargs, "generator": generator})
    return _with_default_generator(device, state, lambda: func(*args, **kwargs))


def _with_default_generator(device: torch.device, state: Tensor, function: Callable[[], Any]) -> Any:
    generator = _default_generator(device)
    before = generator.get_state()
    generator.set_state(state)
    try:
        return function()
    finally:
        generator.set_state(before)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
