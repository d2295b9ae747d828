"""Make what user code does to the parameters of a sharded module, in hooks and in steps, change the shards."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from lightning_paral.compat.torch import fsdp
from lightning_paral.compat.torch.autograd import gradient_hooks, version_of
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.fsdp import name_of, owners_of, unsharded_param
from lightning_paral.compat.torch.optimizers import foreach_copy_
from lightning_paral.compat.torch.tensors import identity_of
from lightning_paral.engines.fsdp.full_values import as_full, shard_like
from lightning_paral.engines.fsdp.hook_access import HookAccess, UnshardedValues
from lightning_paral.engines.fsdp.refusals import RegistrationGuard, check_assigned, refuse_hook, shares_memory
from lightning_paral.engines.fsdp.shown_gradients import ShownGradients
from lightning_paral.errors import ConfigurationError


class UserWrites(UnshardedValues):
    """Makes what user code writes to parameters of a sharded module change the shards, until `undo` is closed.

    Args:
        root: the sharded module.
        groups: the `FSDPParamGroup`s of the module.
        original: returns the parameter that a module had under a name before it was sharded.
        named_originals: the names and parameters that user code could access before sharding.
        in_step: returns whether a step is running.
        undo: a stack.
    """

    def __init__(
        self,
        root: Module,
        groups: list[Any],
        original: Callable[[Module, str], Parameter],
        named_originals: Iterable[tuple[str, Parameter]],
        in_step: Callable[[], bool],
        undo: ExitStack,
    ) -> None:
        params = [param for group in groups for param in group.fsdp_params]
        hooks = _ParameterHooks({param: original(*owners_of(param)[0]) for param in params})
        hooks.check_lost(named_originals, root)
        self._params = params
        self.unsharded: dict[UnitReconciliation, None] = {}
        """The units that are unsharded."""
        self.gradients = ShownGradients()
        self._units = [UnitReconciliation(group, hooks.attach, self) for group in groups]
        self.access = HookAccess(
            lambda: ((name_of(param), param.sharded_param) for param in params), in_step, hooks.register, self
        )
        undo.callback(self.access.remove)
        undo.callback(RegistrationGuard(root, params).remove)

    def check(self) -> None:
        """Raise a `ConfigurationError` if a step has written to parameters that were less precise than the shards."""
        for unit in self._units:
            unit.check()

    def reshard(self) -> None:
        """Write what code has written to views to the shards, and reshard all units, whatever FSDP2 does with them."""
        self.access.flush()
        for unit in tuple(self.unsharded):
            fsdp.reshard(unit.group)

    @property
    def unsharded_params(self) -> list[Any]:
        """The `FSDPParam`s that are unsharded."""
        return [param for unit in self.unsharded for param in unit.group.fsdp_params]

    def show_gradients(self) -> None:
        """Give the unsharded parameters the gradients of the shards, for code that reads those of earlier passes."""
        self.gradients.show(self.unsharded_params)

    def train(self, tensor: Any) -> None:
        """Give the unsharded parameter of a shard the `requires_grad` that code has set on the shard."""
        for param in self.unsharded_params:
            unsharded = unsharded_param(param)
            if param.sharded_param is tensor and unsharded is not None:
                unsharded.requires_grad_(tensor.requires_grad)

    def shards(self) -> dict[Any, Any]:
        """Return the shards by the unsharded parameters."""
        return {unsharded_param(each): each.sharded_param for each in self._params}

    def of(self, tensor: Any) -> Any:
        """Return the unsharded parameter of a shard, if what is written to it can be copied to the shard."""
        unit, found = self._find(tensor)
        return None if unit is None or not found.is_exact else found.parameter.data

    def copy_to_shards(self) -> None:
        """Copy to the shards what was written to their unsharded parameters."""
        for unit in self.unsharded:
            unit.copy_to_shards()

    def copy_from_shard(self, tensor: Any, full: Tensor | None = None) -> None:
        """Copy a shard, or its values `full`, to the unsharded parameter if that is less precise."""
        unit, found = self._find(tensor)
        if unit is not None and not found.is_exact:
            unit.copy_from_shard(found, as_full(tensor) if full is None else full)

    def check_memory(self, parameter: Any, values: Tensor, name: str) -> None:
        """Raise a `ConfigurationError` if `parameter` has the memory of the values of another unsharded parameter."""
        address = parameter.untyped_storage().data_ptr()
        others = [each.values for unit in self._units for each in unit.params or () if each.values is not values]
        if any(each.untyped_storage().data_ptr() == address for each in others):
            raise ConfigurationError(shares_memory(name))

    def _find(self, tensor: Any) -> Any:
        storage = identity_of(local_of(tensor).untyped_storage()) if self.unsharded else None
        found = ((unit, unit.by_storage[storage]) for unit in self.unsharded if storage in unit.by_storage)
        return next(found, (None, None))


class _ParameterHooks:
    """Keeps hooks on the original parameters, and calls them when the unsharded parameters get their gradients.

    A hook gets the full gradient of this rank's batch, as under DDP. Hooks registered before the run are therefore
    called during it, hooks registered during the run stay after it, and their handles can remove them at any time.

    Args:
        originals: the parameter that each `FSDPParam` was created from.
    """

    def __init__(self, originals: dict[Any, Parameter]) -> None:
        self._originals = originals
        self._attached: set[Any] = set()

    def check_lost(self, named: Iterable[tuple[str, Parameter]], root: Module) -> None:
        """Raise a `ConfigurationError` if one of the parameters has hooks and has been replaced since."""
        present = {*self._originals.values(), *root.parameters()}
        for name, parameter in named:
            if parameter not in present and gradient_hooks(parameter):
                refuse_hook(name, "register_hook (while the parameter had no values yet)")

    def register(self, shard: Any, hook: Any) -> RemovableHandle:
        """Register a hook on a sharded parameter, as `torch.Tensor.register_hook` does on a tensor."""
        param = next(param for param in self._originals if param.sharded_param is shard)
        original = self._originals[param]
        if isinstance(original, DTensor):  # sharded by the user
            refuse_hook(name_of(param), "register_hook")
        original.requires_grad_(shard.requires_grad)  # torch refuses hooks on frozen parameters
        handle: RemovableHandle = original.register_hook(hook)  # type: ignore[no-untyped-call]
        if unsharded_param(param) is not None:
            self.attach(param)
        return handle

    def attach(self, param: Any) -> None:
        """Attach the hooks of `param`, if any, to its unsharded parameter."""
        unsharded, original = unsharded_param(param), self._originals[param]
        if unsharded is None or param in self._attached or not gradient_hooks(original):
            return
        if isinstance(unsharded, DTensor) or isinstance(original, DTensor) or unsharded.is_inference():
            refuse_hook(name_of(param), "register_hook")
        self._attached.add(param)
        trained = unsharded.requires_grad
        unsharded.requires_grad_(True)
        unsharded.register_hook(partial(_call_hooks, original))  # type: ignore[no-untyped-call]
        unsharded.requires_grad_(trained)


def _call_hooks(original: Parameter, gradient: Tensor) -> Tensor | None:
    hooks = gradient_hooks(original)
    seen = gradient.to(original.dtype)  # parameters unsharded in 16 bits get 16-bit gradients
    changed = False
    for hook in tuple(hooks.values()):
        result = hook(seen)
        if result is not None:
            seen, changed = result, True
    return seen.to(gradient.dtype) if changed else None


class _Unsharded(NamedTuple):
    param: Any
    """The `FSDPParam`."""

    parameter: Any
    """The unsharded parameter, which is the same object each time."""

    values: Tensor
    """The memory into which FSDP2 gathers."""

    @property
    def shard(self) -> Tensor:
        return local_of(self.param.sharded_param)

    @property
    def own_part(self) -> Tensor:
        """The part of the values that this rank's shard has, which is not empty."""
        return fsdp.local_shard_view(self.param, self.values)

    @property
    def is_exact(self) -> bool:
        """Whether what is written to the values can be copied to the shard."""
        return self.param.param_dtype is None and self.shard.device == self.values.device

    @property
    def is_assigned(self) -> bool:
        """Whether user code has assigned other memory to `data`."""
        return not isinstance(self.parameter, DTensor) and not self.parameter.is_set_to(self.values)


class UnitReconciliation:
    """Compares this rank's part of the unsharded parameters of a unit with its shards, whenever the unit is resharded.

    What differs is copied to the shards, unless user code or an optimizer has written to these meanwhile. If the
    unsharded parameters are less precise, or the shards in host memory, writing to them is an error, which `check`
    raises: reading the comparison at once would make the host wait for the device.

    Args:
        group: the `FSDPParamGroup` of the unit.
        after_unshard: is called with each `FSDPParam` after it has been unsharded for the first time.
        writes: knows all units, and which are unsharded.
    """

    def __init__(self, group: Any, after_unshard: Callable[[Any], None], writes: UserWrites) -> None:
        self.group = group
        self._first_unshard = after_unshard
        self._writes = writes
        self._by_storage: dict[int | None, _Unsharded] | None = None
        self.params: list[_Unsharded] | None = None
        """The parameters of the unit, once it has been unsharded."""
        self._exact: list[_Unsharded] = []
        self._inexact: list[_Unsharded] = []
        self._versions: list[int] = []
        self._trained: list[bool] = []
        self._handed_out: Tensor | None = None
        """The parts of the parameters that must not be written to, one after the other, as they were unsharded."""
        self._changed: Tensor | None = None
        """The first position in them that a step has changed, or -1."""
        fsdp.watch(group, self._after_unshard, self._before_reshard)

    def check(self) -> None:
        """Raise a `ConfigurationError` if a step has written to parameters that must not be written to."""
        position = -1 if self._changed is None else int(self._changed)
        if position >= 0:
            ends = accumulate(each.shard.numel() for each in self._inexact)
            number = next(number for number, end in enumerate(ends) if position < end)
            raise ConfigurationError(_explain_lost_write(self._inexact[number].param))

    def _after_unshard(self) -> None:
        if self.params is None:  # FSDP2 creates the unsharded parameters only once
            self.params = []
            for param in self.group.fsdp_params:
                parameter = fsdp.unsharded_param(param)
                assert parameter is not None
                if not parameter.is_inference():
                    values = local_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()
                    self.params.append(_Unsharded(param, parameter, values))
                self._first_unshard(param)
            with_part = [each for each in self.params if each.shard.numel()]
            self._exact = [each for each in with_part if each.is_exact]
            self._inexact = [each for each in with_part if not each.is_exact]
        self._versions = [version_of(each.shard) for each in self._exact]
        self._trained = [each.parameter.requires_grad for each in self.params]
        self._by_storage = None
        self._writes.unsharded[self] = None
        self._handed_out = self._parts_to_compare()

    @property
    def by_storage(self) -> dict[int | None, _Unsharded]:
        """The unsharded parameters by the memory of their shards."""
        if self._by_storage is None:
            self._by_storage = {identity_of(each.shard.untyped_storage()): each for each in self.params or ()}
        return self._by_storage

    def _before_reshard(self) -> None:
        self._writes.gradients.hide(self.group.fsdp_params)
        for each, trained in zip(self.params or (), self._trained, strict=True):
            if each.parameter.requires_grad != trained:  # FSDP2 copies that of the shard when it unshards again
                each.param.sharded_param.requires_grad_(not trained)
        self.copy_to_shards()
        self._note_changes()
        self._handed_out = None
        self._writes.unsharded.pop(self, None)

    @torch.no_grad()
    def copy_to_shards(self) -> None:
        """Copy this rank's part of the unsharded parameters to the shards that nothing else has written to."""
        assert self.params is not None
        for each in self.params:
            if each.is_assigned:
                self._take_assigned(each)
        shards, parts = [], []
        for each, version in zip(self._exact, self._versions, strict=True):
            if version_of(shard := each.shard) == version:
                shards.append(shard.data)  # which keeps the version of the shard
                parts.append(each.own_part)
        if shards:
            foreach_copy_(shards, parts)
            fsdp.await_writes(self.group)

    @torch.no_grad()
    def copy_from_shard(self, unsharded: _Unsharded, full: Tensor) -> None:
        """Copy what was written to a shard, `full`, to its unsharded parameter, which is less precise."""
        self._note_changes()
        values = unsharded.parameter.data
        part = local_of(shard_like(values, full)) if isinstance(values, DTensor) else full
        (local_of(values) if isinstance(values, DTensor) else values).copy_(part)
        self._handed_out = self._parts_to_compare()

    def _note_changes(self) -> None:
        """Note whether a step has written to parameters that must not be written to, since they were handed out."""
        now = self._parts_to_compare()
        if now is not None and self._handed_out is not None:
            differs = (now != self._handed_out) & (now == now)  # not where values are NaN
            first = torch.where(differs.any(), differs.int().argmax(), -1)
            self._changed = first if self._changed is None else torch.maximum(self._changed, first)

    def _take_assigned(self, unsharded: _Unsharded) -> None:
        param, parameter, values = unsharded
        name, assigned = str(fsdp.name_of(param)), parameter.detach()
        parameter.data = values
        check_assigned(name, parameter, assigned)
        self._writes.check_memory(assigned, values, name)
        values.copy_(assigned.clone())  # it may be a view of the values

    def _parts_to_compare(self) -> Tensor | None:
        parts = [each.own_part.reshape(-1) for each in self._inexact]
        return torch.cat(parts) if parts else None


def _explain_lost_write(param: Any) -> str:
    shard = local_of(param.sharded_param)
    dtype = str(param.param_dtype or shard.dtype).removeprefix("torch.")
    return (
        f"{fsdp.name_of(param)} was changed while it was unsharded, in a step or in a method of its unit. An "
        f"unsharded parameter is a copy in {dtype} on the device of the step, of a shard in "
        f"{str(shard.dtype).removeprefix('torch.')} on {shard.device.type}. Change it in a hook such as "
        "on_train_batch_end or on_before_zero_grad, where parameters are sharded, or train with precision='32-true' or "
        "'bf16-true' and without offload."
    )
