"""Parts of sharded tensors that torch gathers where one tensor gives a view: what is written to them is written back.

`p.data[0].zero_()` would otherwise change a copy, and nothing would say so.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.errors import ConfigurationError
from lightning_paral.fsdp.rows import in_place_of, is_replicated, own_rows


class Part(DTensor):
    """A gathered copy of some elements of a sharded tensor. Its in-place methods write to where they come from."""

    _taken: "Callable[[Tensor], Tensor]"
    _origin: DTensor

    def write_back(self) -> None:
        """Write the elements to where they come from: each rank those it holds."""
        origin: Any = self._origin
        rows = own_rows(origin)
        if rows is None or not is_replicated(self):
            raise ConfigurationError(
                "A part of a sharded parameter was changed in place, which cannot be brought back to it. Assign to "
                "the parameter by index instead: parameter.data[...] = value."
            )
        with torch.no_grad():
            whole = in_place_of(origin, rows)
            self._taken(whole).copy_(self._local_tensor)
            origin._local_tensor.copy_(whole[rows])
        torch.autograd.graph.increment_version(origin)
        if isinstance(origin, Part):
            origin.write_back()


def mark_parts(result: Any, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let `result`, of a view operation, know what it is a part of, if it is a copy."""
    origin, *others = args
    if not isinstance(origin, DTensor):
        return result
    several = isinstance(result, list | tuple)
    for number, part in enumerate(result if several else [result]):
        if not isinstance(part, DTensor):
            continue
        copied = is_replicated(part) and (isinstance(origin, Part) or not is_replicated(origin))
        if copied:

            def taken(whole: Tensor, number: int = number) -> Any:
                view = operation(whole, *others, **kwargs)
                return view[number] if several else view

            part.__class__ = Part
            part._taken, part._origin = taken, origin  # type: ignore[attr-defined]
    return result


def _then_write_back(name: str) -> Callable[..., Any]:
    def change(self: Part, *args: Any, **kwargs: Any) -> Any:
        getattr(super(Part, self), name)(*args, **kwargs)
        self.write_back()
        return self

    change.__name__ = name
    return change


_NO_WRITES = ("requires_grad_", "detach_", "retain_grad_", "share_memory_", "rename_", "resize_", "resize_as_")
for _name in dir(Tensor):
    _in_place = _name.endswith("_") and not _name.startswith("_") and _name not in _NO_WRITES
    _augmented = _name.startswith("__i") and _name.endswith("__") and _name.removeprefix("__i")[:-2] in (
        "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
    )  # fmt: skip
    if _in_place or _augmented or _name == "__setitem__":
        setattr(Part, _name, _then_write_back(_name))
