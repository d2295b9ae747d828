"""A log of operations on meta tensors, from which any of these tensors can be materialized."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_paral.compat.torch.tensors import identity_of, tree_leaves, tree_map_only

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
