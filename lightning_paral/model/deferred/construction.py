"""Deferred construction: a module is built without its values, which are drawn later, a unit at a time, and the same.

While `configure_model` runs, large tensors are made on the meta device, and every operation on them is written down
together with the state of the random number generator before it. Any tensor can then be computed by repeating what
led to it. Operations that draw random numbers run once on the spot, into memory that is freed at once: whatever is
drawn after them comes out as it would have.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.model.deferred import recorder
from lightning_paral.model.deferred.op_log import OpLog, View
from lightning_paral.model.deferred.recorder import MetaDisguise, Recorder
from lightning_paral.model.pretrained import was_loaded


class DeferredConstruction:
    """What was made without values inside `recording()`, and the way to the values.

    Args:
        device: where tensors are made if the code names no other, and whose generator draws them then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._log = OpLog()
        self._hollow: dict[int, tuple[Tensor, View]] = {}
        self._shared: dict[int, Tensor] = {}
        self._put_aside: dict[int, tuple[Parameter, Parameter]] = {}

    @contextmanager
    def recording(self, module: Module) -> Iterator[None]:
        """Make large tensors without values until the end of the block; then see which of them `module` has."""
        with self._device, MetaDisguise(self._log), Recorder(self._log, self._device):
            yield
        for part in module.modules():
            for tensor in _tensors_of(part):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if self._log.owns(local):
                    self._hollow[id(tensor)] = (tensor, View.of(local))

    def put_loaded_aside(self, module: Module) -> None:
        """Let `module` have no values for large parameters that `from_pretrained` has read, until they are filled.

        They lie in mapped files and take no memory. Converted to another dtype they would: all of them at once, where
        the module is converted, but a unit's at a time where they are filled.
        """
        meta: dict[int, Tensor] = {}
        for parameter in module.parameters():
            num_bytes = parameter.numel() * parameter.element_size()
            has_values = type(parameter) is Parameter and not parameter.is_meta
            if has_values and num_bytes > recorder.DEFERRED_BYTES and was_loaded(parameter):
                placeholder = Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                meta[id(parameter)] = placeholder
                self._put_aside[id(placeholder)] = (placeholder, parameter)
        for part in module.modules():
            _replace(part, meta)

    @property
    def is_empty(self) -> bool:
        """Whether everything in the module has its values."""
        return not self._hollow and not self._put_aside

    def fill(self, modules: Iterable[Module]) -> None:
        """Compute what `modules` themselves hold, submodules aside, and put it in place of what has no value.

        A parameter that several modules hold is filled once: give all of them in one call.
        """
        modules = list(modules)
        held = dict.fromkeys(id(tensor) for module in modules for tensor in _tensors_of(module))
        meta = {key: self._hollow.pop(key) for key in held if key in self._hollow}
        filled = dict(self._shared)
        for key in [key for key in held if key in self._put_aside]:
            placeholder, parameter = self._put_aside.pop(key)
            parameter.data = parameter.data.to(placeholder.dtype)
            filled[key] = parameter.requires_grad_(placeholder.requires_grad)
        materialize = self._log.materialize([view for _, view in meta.materialize()])
        for (key, (tensor, _)), value in zip(meta.items(), materialize, strict=True):
            filled[key] = _like(tensor, value)
            if not isinstance(tensor, Parameter):
                self._shared[key] = filled[key]  # buffers may lie in several units, parameters never do
        for module in modules:
            _replace(module, filled)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    value = value.to(tensor.dtype)  # `module.bfloat16()` may have been called since
    if isinstance(tensor, DTensor):
        value = DTensor.from_local(
            value, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    if not isinstance(tensor, Parameter):
        return value
    parameter = Parameter(value, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter


def _tensors_of(module: Module) -> Iterator[Tensor]:
    """Yield the tensors `module` itself holds: parameters, buffers, attributes, and those in lists and dicts."""

    def search(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            for entry in value.materialize():
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
