"""Write changes that were made to views of sharded tensors back to the shards.

Some of these views are copies that torch gathers, so `p.data[0].zero_()` would silently change only the copy.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass, version_of
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.optimizers import writes_in_place
from lightning_paral.engines.fsdp.local_rows import full_from_chunk, is_replicated, own_chunk
from lightning_paral.errors import ConfigurationError


class GatheredView(DTensor):
    """A gathered copy of some elements of a sharded tensor, which is called its origin; or a view of such a copy.

    It behaves like a view of the origin: each use gathers the current elements, and each write changes the origin. Both
    are *collective*.
    """

    _origin: Any
    _take: Callable[[Any], Any] | None
    """Selects the elements from the origin or from a full tensor of its shape. `None` if the origin is a gathered copy
    and this is a view of its memory."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            name = func.__name__
            parts = [] if name in _WITHOUT_VALUES else list(_views_in((*args, *kwargs.values())))
            if name != "__get__":
                for part in parts:
                    part.refresh()
            before = [version_of(part) for part in parts]
            result = func(*args, **kwargs)
            written = list(_views_in(args[:1])) if writes_in_place(name) else []
            written += [part for part, version in zip(parts, before, strict=True) if version_of(part) != version]
            for part in written:
                part.write_back()
            for part in parts:
                _mark_views(result, part)
        return result

    def full_tensor(self, **options: Any) -> Tensor:
        """Return the elements as a plain tensor. *Collective*."""
        self.refresh()
        full: Tensor = super().full_tensor(**options)
        return full

    def refresh(self) -> None:
        """Gather the current elements. *Collective*."""
        if self._take is None:
            self._origin.refresh()
        else:
            if isinstance(self._origin, GatheredView):
                self._origin.refresh()
            with torch.no_grad():
                local_of(self).copy_(local_of(self._take(self._origin)))

    def write_back(self) -> None:
        """Write the elements to the origin; each rank writes to its shard."""
        origin = self._origin
        if self._take is None:
            origin.write_back()
            return
        chunk = own_chunk(origin)
        if chunk is None or not is_replicated(self):
            raise ConfigurationError(
                "A view of a sharded parameter was changed in place, and the change cannot be written to the shards. "
                "Assign to the parameter by index instead: parameter.data[...] = value."
            )
        with torch.no_grad():
            full = full_from_chunk(origin, chunk)
            self._take(full).copy_(local_of(self))
            local_of(origin).copy_(full[chunk])
        torch.autograd.graph.increment_version(origin)
        if isinstance(origin, GatheredView):
            origin.write_back()


_WITHOUT_VALUES = {
    "size", "dim", "numel", "nelement", "stride", "is_contiguous", "__len__", "is_floating_point", "is_complex",
    "element_size", "data_ptr", "__hash__", "requires_grad_", "__set__",
}  # fmt: skip
"""Methods that neither read nor write values."""


def _views_in(values: Any) -> Iterator[GatheredView]:
    for value in values:
        if isinstance(value, GatheredView):
            yield value
        elif isinstance(value, list | tuple):
            yield from _views_in(value)


def _mark_views(result: Any, part: GatheredView) -> None:
    """Turn the tensors in `result` that share memory with `part` into views of `part`."""
    for value in result if isinstance(result, list | tuple) else [result]:
        if type(value) is DTensor and _address(value) == _address(part):
            value.__class__ = GatheredView
            value._origin, value._take = part, None  # type: ignore[attr-defined]


def _address(tensor: Any) -> int:
    pointer: int = local_of(tensor).untyped_storage().data_ptr()
    return pointer


def mark_gathered(result: Any, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Turn the result of a view operation into a `GatheredView` of the first argument if torch gathered a copy."""
    origin, *others = args
    if not isinstance(origin, DTensor):
        return result
    several = isinstance(result, list | tuple)
    for number, part in enumerate(result if several else [result]):
        if type(part) is not DTensor or not is_replicated(part):
            continue
        if isinstance(origin, GatheredView) and _address(part) == _address(origin):
            part.__class__ = GatheredView
            part._origin, part._take = origin, None  # type: ignore[attr-defined]
        elif isinstance(origin, GatheredView) or not is_replicated(origin):

            def take(tensor: Any, number: int = number) -> Any:
                view = operation(tensor, *others, **kwargs)
                return view[number] if several else view

            part.__class__ = GatheredView
            part._origin, part._take = origin, take  # type: ignore[attr-defined]
    return result
