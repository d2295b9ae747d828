"""Restore a module after a run: its classes, hooks and parameters, with full values in host memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.fsdp import forget
from lightning_paral.compat.torch.modules import hook_tables, own_parameters
from lightning_paral.model.gradients import full_copy

LEFT_SHARDED = "_lightning_paral_left_sharded"
"""Attribute that is set on a module that could not be restored; its value is the reason."""


class ModuleSnapshot:
    """The class, attributes, hooks and parameters of each of `modules`: all submodules of a root, which is the first.

    Parameters keep their identity: references to them, and ties between them, are valid again after the run. While the
    module is sharded, they are empty.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        self._classes = {module: type(module) for module in modules}
        self._attributes = {module: set(vars(module)) for module in self._classes}
        self._hooks = {module: _hooks_of(module) for module in self._classes}
        self._parameters = {module: dict(own_parameters(module)) for module in self._classes}
        self._added: dict[Module, tuple[set[str], dict[str, set[int]]]] = {}

    def record_values(self, modules: Iterable[Module]) -> None:
        """Record the current parameters of `modules`, which replace recorded parameters that had no values."""
        self._parameters |= {module: dict(own_parameters(module)) for module in modules}

    def free_full(self, modules: Iterable[Module]) -> None:
        """Free the memory of the parameters of `modules` that have been replaced by shards."""
        for module in modules:
            for name, parameter in self._parameters[module].items():
                if parameter is not None and own_parameters(module).get(name) is not parameter:
                    parameter.data = parameter.new_empty(0)

    def original(self, module: Module, name: str) -> Parameter:
        """Return the parameter that `module` had under `name` before sharding."""
        parameter = self._parameters[module][name]
        assert parameter is not None
        return parameter

    def mark_added(self) -> None:
        """Record the attributes and hooks that sharding has added to each submodule, for `restore` to remove."""
        for module, before in self._hooks.items():
            hooks = {name: keys - before[name] for name, keys in _hooks_of(module).items()}
            self._added[module] = set(vars(module)) - self._attributes[module], hooks

    def restore(self, obstacle: str | None) -> dict[Parameter, Parameter]:
        """Restore the submodules, with full parameters on CPU. *Collective* over the ranks that hold the shards.

        Args:
            obstacle: the reason why the submodules stay sharded; `None` if they do not.

        Returns:
            dict[Parameter, Parameter]: the module's own parameters by sharded parameter; empty if they stay sharded.
        """
        if obstacle is not None:
            vars(next(iter(self._classes)))[LEFT_SHARDED] = obstacle
            return {}
        originals: dict[Parameter, Parameter] = {}
        for module, own_class in self._classes.items():
            present = own_parameters(module)
            for name, current in list(present.items()):
                if current is not None and current not in originals:
                    original = self._parameters[module].get(name)
                    originals[current] = _with_full_value(current, current if original is None else original)
                present[name] = None if current is None else originals[current]
            attributes, hooks = self._added.get(module, (set(), {}))
            for name in attributes:
                vars(module).pop(name, None)
            tables = hook_tables(module)
            for name, keys in hooks.items():
                for key in keys:
                    tables[name].pop(key, None)
            if isinstance(module, FSDPModule) and type(module) is not own_class:
                module.__class__ = own_class  # type: ignore[assignment]
                forget(module)
        return originals


def _hooks_of(module: Module) -> dict[str, set[int]]:
    return {name: set(table) for name, table in hook_tables(module).items()}


def _with_full_value(current: Parameter, original: Parameter) -> Parameter:
    """Return `original` with the full value of `current` on the CPU; `current` itself if it has no value."""
    if (local_of(current) if isinstance(current, DTensor) else current).is_meta:
        return current
    if isinstance(current, DTensor):
        original.data = full_copy(_as_bytes(current)).to("cpu").view(current.dtype).squeeze(-1)
    else:
        original.data = current.detach().to("cpu", copy=True)
    original.requires_grad_(current.requires_grad)
    original.grad = None
    return original


def _as_bytes(tensor: Any) -> Tensor:
    """Return a DTensor as one of bytes, in a last dimension: gloo sends neither float8 nor int16."""
    local = local_of(tensor.detach()).contiguous().unsqueeze(-1).view(torch.uint8)
    shape = torch.Size((*tensor.shape, tensor.element_size()))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, shape=shape, stride=stride, run_check=False)
