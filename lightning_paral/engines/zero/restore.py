"""Record the attributes and hooks of a module before DeepSpeed changes them, and restore them after a run."""

from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.deepspeed import stage3
from lightning_paral.compat.deepspeed.stage3 import is_from_deepspeed, restore_container
from lightning_paral.compat.torch import modules
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.engines.zero.partition import (
    full_numel,
    full_shape,
    is_partitioned,
    is_stage3_parameter,
)


class ModuleSnapshot:
    """Records the attributes and hooks of all submodules and parameters, and removes those that DeepSpeed adds.

    DeepSpeed leaves hooks, methods and references on every module and parameter. They would keep DeepSpeed's buffers
    alive and break the next engine.

    Args:
        module: the module before DeepSpeed gets it.
    """

    def __init__(self, module: Module) -> None:
        self._modules = [(part, _attributes_and_hooks(part)) for part in module.modules()]
        self._parameters = [(parameter, set(vars(parameter))) for parameter in module.parameters()]
        self.was_full = not any(is_stage3_parameter(parameter) for parameter in module.parameters())
        """Whether every rank had all parameters in full, in memory, before the run."""

    @property
    def num_bytes(self) -> int:
        """The size of all full parameters in bytes."""
        return sum(full_numel(parameter) * parameter.element_size() for parameter, _ in self._parameters)

    def restore(self, gather: bool) -> None:
        """Remove what DeepSpeed added, and leave parameters full, in host memory, without gradients.

        *Collective* over the world if `gather`. Otherwise, partitioned parameters stay partitioned.
        """
        partitioned = any(is_stage3_parameter(parameter) for parameter, _ in self._parameters)
        unpartition = gather or (self.was_full and not partitioned)
        if unpartition:
            for parameter, names in self._parameters:
                parameter.data = _full_on_host(parameter)
                parameter.grad = None
                for name in set(vars(parameter)) - (names if self.was_full else _users_attributes(parameter)):
                    delattr(parameter, name)
        for part, recorded in self._modules:
            _restore_module(part, recorded)


def _users_attributes(parameter: Any) -> set[str]:
    """Return the names of the attributes that DeepSpeed did not set on `parameter`, which was built partitioned."""
    return {name for name, value in vars(parameter).items() if not is_from_deepspeed(name, value)}


def _full_on_host(parameter: Any) -> Tensor:
    # A buffer of NVMe is needed by the next parameter.
    with stage3.in_memory(parameter, write=False) if is_partitioned(parameter) else nullcontext():
        if is_partitioned(parameter):
            parameter.all_gather()
        full: Tensor = parameter.data.detach().to("cpu", copy=True).view(full_shape(parameter))
    return full


_Recorded = tuple[set[str], dict[str, set[int]], type]
"""The attribute names of a module, the keys of its hooks by attribute, and the class of its parameter container."""


def _attributes_and_hooks(part: Module) -> _Recorded:
    hooks = {name: set(modules.hooks_in(part, name)) for name in modules.ALL}
    return set(vars(part)), hooks, type(own_parameters(part))


def _restore_module(part: Module, recorded: _Recorded) -> None:
    names, hooks, container = recorded
    for name, recorded_keys in hooks.items():
        installed = modules.hooks_in(part, name)
        for key in set(installed) - recorded_keys:
            del installed[key]
    for name in set(vars(part)) - names:
        if is_from_deepspeed(name, vars(part)[name]):
            delattr(part, name)
    restore_container(part, container)
