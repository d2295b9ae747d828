"""Build a module on the meta device, then materialize it one unit at a time, with the values of ordinary construction.

While `configure_model` runs, large tensors are created on the meta device. Every operation on them is logged, with the
state of the random number generator before it. Any tensor can then be materialized by repeating the operations that
produced it. Operations that draw random numbers also run at once, into memory that is freed immediately, so that later
draws get the numbers that they would get without deferral.
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
from lightning_paral.model.hugging_face import is_pretrained


class DeferredConstruction:
    """The tensors that were deferred inside `recording()`, and the log to materialize them from.

    Args:
        device: the default device of new tensors, and of the generator that draws their values.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._log = OpLog()
        self._meta: dict[int, tuple[Tensor, View]] = {}
        self._shared: dict[int, Tensor] = {}
        self._loaded: dict[int, tuple[Parameter, Parameter]] = {}

    @contextmanager
    def recording(self, module: Module) -> Iterator[None]:
        """Defer large tensors that the block creates; on exit, find those that `module` holds."""
        with self._device, MetaDisguise(self._log), Recorder(self._log, self._device):
            yield
        for part in module.modules():
            for tensor in _tensors_of(part):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if self._log.owns(local):
                    self._meta[id(tensor)] = (tensor, View.of(local))

    def defer_loaded(self, module: Module) -> None:
        """Replace large parameters that `from_pretrained` has read with meta tensors, until `fill` is called.

        They are views of memory-mapped files, and take no memory until they are converted to another dtype. Converting
        the module would take memory for all of them at once; `fill` takes it for one unit at a time.
        """
        meta: dict[int, Tensor] = {}
        for parameter in module.parameters():
            num_bytes = parameter.numel() * parameter.element_size()
            has_values = type(parameter) is Parameter and not parameter.is_meta
            if has_values and num_bytes > recorder.DEFERRED_BYTES and is_pretrained(parameter):
                placeholder = Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                meta[id(parameter)] = placeholder
                self._loaded[id(placeholder)] = (placeholder, parameter)
        for part in module.modules():
            _replace(part, meta)

    @property
    def is_empty(self) -> bool:
        """Whether no tensor is left to materialize."""
        return not self._meta and not self._loaded

    def fill(self, modules: Iterable[Module]) -> None:
        """Materialize the deferred tensors that `modules` hold directly; those of submodules stay deferred.

        Pass all modules that share a parameter in the same call: it is materialized once.
        """
        modules = list(modules)
        held = dict.fromkeys(id(tensor) for module in modules for tensor in _tensors_of(module))
        meta = {key: self._meta.pop(key) for key in held if key in self._meta}
        filled = dict(self._shared)
        for key in [key for key in held if key in self._loaded]:
            placeholder, parameter = self._loaded.pop(key)
            parameter.data = parameter.data.to(placeholder.dtype)
            filled[key] = parameter.requires_grad_(placeholder.requires_grad)
        values = self._log.materialize([view for _, view in meta.values()])
        for (key, (tensor, _)), value in zip(meta.items(), values, strict=True):
            filled[key] = _like(tensor, value)
            if not isinstance(tensor, Parameter):
                self._shared[key] = filled[key]  # units may share buffers, but never parameters
        for module in modules:
            _replace(module, filled)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    value = value.to(tensor.dtype)  # `module.bfloat16()` may have been called in between
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
    """Yield the tensors that `module` holds directly: parameters, buffers, attributes, and those in lists and dicts."""

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
