"""A snapshot of a module before it is sharded, from which it is restored."""

from collections.abc import Iterable

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.fsdp import forget
from lightning_paral.compat.torch.modules import hook_tables, own_parameters
from lightning_paral.engines.fsdp.gather import GatherToHost

LEFT_SHARDED = "_lightning_paral_left_sharded"
"""Attribute that is set on a module that could not be restored; its value is the reason."""


class ModuleSnapshot:
    """The class, attributes, hooks and parameters of each of `modules`: all submodules of a root, which is the first.

    Parameters keep their identity: references to them, and ties between them, are valid again after the run. While the
    module is sharded, they are empty.
    """

    def __init__(self, modules: Iterable[Module]) -> None:
        self._submodules = {module: _Submodule(module) for module in modules}

    def record_values(self, modules: list[Module]) -> None:
        """Record the current parameters of `modules`, which replace recorded parameters that had no values."""
        for module in modules:
            self._submodules[module].record_parameters()

    def free_full(self, modules: list[Module]) -> None:
        """Free the memory of the parameters of `modules` that have been replaced by shards."""
        for module in modules:
            self._submodules[module].free_full()

    def original(self, module: Module, name: str) -> Parameter:
        """Return the parameter that `module` had under `name` before sharding."""
        parameter = self._submodules[module].parameters[name]
        assert parameter is not None
        return parameter

    def mark_added(self) -> None:
        """Record the attributes and hooks that sharding has added to each submodule, for `restore` to remove."""
        for submodule in self._submodules.values():
            submodule.mark_added()

    def restore(self, gather: GatherToHost | str) -> dict[Parameter, Parameter]:
        """Restore the submodules, with full parameters on CPU. *Collective* over the group of `gather`.

        Args:
            gather: gathers full parameters, or is the reason why the submodules stay sharded.

        Returns:
            dict[Parameter, Parameter]: the module's own parameters by sharded parameter; empty if they stay sharded.
        """
        if isinstance(gather, str):
            vars(next(iter(self._submodules)))[LEFT_SHARDED] = gather
            return {}
        originals: dict[Parameter, Parameter] = {}
        for submodule in self._submodules.values():
            submodule.restore(gather, originals)
        return originals


class _Submodule:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._class = type(module)
        self._attributes = set(vars(module))
        self._hooks = {name: set(table) for name, table in hook_tables(module).items()}
        self.parameters = dict(own_parameters(module))
        self._added: tuple[set[str], dict[str, set[int]]] = (set(), {})

    def record_parameters(self) -> None:
        self.parameters = dict(own_parameters(self._module))

    def free_full(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter is not None and own_parameters(self._module).get(name) is not parameter:
                parameter.data = parameter.new_empty(0)

    def mark_added(self) -> None:
        hooks = {name: set(table) - self._hooks[name] for name, table in hook_tables(self._module).items()}
        self._added = (set(vars(self._module)) - self._attributes, hooks)

    def restore(self, gather: GatherToHost, originals: dict[Parameter, Parameter]) -> None:
        module, present = self._module, own_parameters(self._module)
        for name, current in list(present.items()):
            if current is None:
                continue
            if current not in originals:
                original = self.parameters.get(name)
                originals[current] = _with_full_value(current, current if original is None else original, gather)
            present[name] = originals[current]
        attributes, hooks = self._added
        for name in attributes:
            vars(module).pop(name, None)
        tables = hook_tables(module)
        for name, keys in hooks.items():
            for key in keys:
                tables[name].pop(key, None)
        if isinstance(module, FSDPModule) and type(module) is not self._class:
            module.__class__ = self._class  # type: ignore[assignment]
            forget(module)


def _with_full_value(current: Parameter, original: Parameter, gather: GatherToHost) -> Parameter:
    """Return `original` with the full value of `current`; `current` itself if it has no value."""
    value = gather(current) if isinstance(current, DTensor) else current.detach()
    if value.is_meta:
        return current
    original.data = value if isinstance(current, DTensor) else value.to("cpu", copy=True)
    original.requires_grad_(current.requires_grad)
    original.grad = None
    return original
