"""Make `parameter.data = value` change shards. In torch (2.13), the assignment is accepted but has no effect."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_paral.compat.torch.dtensor import copy_data_and_layout, local_of, set_local
from lightning_paral.compat.torch.fsdp import gather_from, name_of
from lightning_paral.engines.fsdp.local_rows import own_chunk
from lightning_paral.engines.fsdp.view_writes import GatheredView
from lightning_paral.errors import ConfigurationError

_DATA: Any = Tensor.data


class DataDescriptor:
    """Replaces the descriptor `DTensor.data` while a module is sharded, so that assignment takes effect.

    Args:
        param_of: returns the `FSDPParam` of a sharded parameter, and `None` for any other DTensor.
    """

    def __init__(self, param_of: Callable[[Any], Any]) -> None:
        self._param_of = param_of

    def __get__(self, tensor: Any, owner: type | None = None) -> Any:
        return self if tensor is None else _DATA.__get__(tensor)

    def __set__(self, tensor: Any, value: Tensor) -> None:
        param = self._param_of(tensor)
        if param is None:
            _assign_to_dtensor(tensor, value)
        else:
            _assign(param, value)


def check_assigned(name: str, current: Any, value: Any) -> None:
    """Raise a `ConfigurationError` unless `value` has the shape, dtype and device type of `current`.

    Args:
        name: the name of the parameter, for the message.
        current: the parameter.
        value: the tensor that was assigned to `data`.
    """

    def describe(tensor: Tensor) -> str:
        return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"

    if describe(current) != describe(value):
        raise ConfigurationError(
            f"{name}.data was assigned a tensor of {describe(value)}, but the parameter is of {describe(current)}. "
            "Under FSDP, the shape, dtype and device of a parameter cannot change while it is sharded. Convert the "
            "value first, or change the module before training."
        )


def _assign(param: Any, value: Any) -> None:
    target = param.sharded_param
    check_assigned(str(name_of(param)), target, value)
    value = value.detach()
    if not isinstance(value, DTensor):
        chunk = own_chunk(target)
        if chunk is None:
            raise ConfigurationError(
                f"{name_of(param)}.data was assigned a full tensor, but your own code sharded the parameter, with "
                f"placements {target.placements}. Assign a DTensor with the same placements."
            )
        set_local(value, value[chunk].clone())
    elif (value.device_mesh, value.placements) != (target.device_mesh, target.placements):
        value = value.redistribute(target.device_mesh, target.placements)
    _rebind(param, value)


def _rebind(param: Any, value: Any) -> None:
    """Make `param` use the memory of `value`, as assignment to a plain tensor does, and let FSDP2 gather from it."""
    local = local_of(value)
    if local.numel() == 0:
        return
    size, dim = param.padded_sharded_param_size, param.fsdp_placement.dim
    padded = _padded_memory(local, size.numel())
    if padded is None or (param.pin_memory and not local.is_pinned()):
        memory = local.new_zeros(size)
        if param.pin_memory:
            memory = memory.pin_memory()
        memory.narrow(dim, 0, local.size(dim)).copy_(local)
        padded = memory.view(-1)
        # The value shares this memory, so that later writes to the value change the parameter.
        local = memory.narrow(dim, 0, local.size(dim))
        set_local(value, local)
    gather_from(param, padded, local)


def _padded_memory(local: Tensor, num_elements: int) -> Tensor | None:
    """Return the memory of `local` with the padding that FSDP2 all-gathers; `None` if it has no such padding."""
    storage = local.untyped_storage()
    fits = storage.nbytes() == num_elements * local.element_size()
    if not fits or not local.is_contiguous() or local.storage_offset() != 0:
        return None
    return torch.as_strided(local, (num_elements,), (1,))


def _assign_to_dtensor(tensor: Any, value: Any) -> None:
    if isinstance(tensor, GatheredView):
        tensor.__class__ = DTensor  # type: ignore[assignment]  # with different memory, it is no longer a view
    if not isinstance(value, DTensor):
        check_assigned("A sharded tensor", tensor, value)
        with torch.no_grad():
            tensor.copy_(value)
        return
    _DATA.__set__(tensor, value)
    copy_data_and_layout(tensor, value)
