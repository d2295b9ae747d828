"""Make what user code does to the parameters of a sharded module, in hooks and in steps, change the shards."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from lightning_paral.compat.torch import fsdp
from lightning_paral.compat.torch.autograd import (
    DisableTorchFunctionSubclass,
    check_backward_passes,
    gradient_hooks,
    share_gradient_hooks,
    version_of,
)
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.fsdp import is_param_of, name_of, owners_of, unsharded_param
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.compat.torch.optimizers import foreach_copy_
from lightning_paral.compat.torch.tensors import identity_of
from lightning_paral.engines.fsdp.full_values import shard_like
from lightning_paral.engines.fsdp.hook_access import HookAccess
from lightning_paral.engines.fsdp.refusals import check_assigned, refuse_hook, refuse_replaced, shares_memory
from lightning_paral.errors import ConfigurationError


class UserWrites:
    """Makes what user code writes to parameters of a sharded module change the shards, until `undo` is closed.

    While a unit is unsharded, its unsharded parameters have its values, and what is written to them is copied to the
    shards before these are read. A unit is resharded before one of its shards is written to.

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
        self.hooks = _ParameterHooks({param: original(*owners_of(param)[0]) for param in params})
        self.hooks.check_lost(named_originals, root)
        self._params = params
        self.unsharded: dict[UnitReconciliation, None] = {}
        """The units that are unsharded."""
        self.gradients = ShownGradients()
        self._has_changed = False
        self._units = [UnitReconciliation(group, self) for group in groups]
        self.access = HookAccess(
            lambda: ((name_of(param), param.sharded_param) for param in params),
            in_step,
            self.hooks.register,
            self._before_use,
        )
        undo.callback(self.access.remove)

    def check(self) -> None:
        """Raise a `ConfigurationError` for writes that were lost, and parameters that were replaced."""
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

    def change_gradients(self, change: Callable[[], None]) -> None:
        """Call `change`, which changes gradients of shards, and show them anew."""
        self.gradients.hide(self.unsharded_params)
        with DisableTorchFunctionSubclass():
            change()
        self.show_gradients()

    def shards(self) -> dict[Any, Any]:
        """Return the shards by the unsharded parameters."""
        return {unsharded_param(each): each.sharded_param for each in self._params}

    def memory(self) -> dict[int, Any]:
        """Return the `FSDPParam`s that are unsharded, by the address of their unsharded values."""
        params = [each for unit in self.unsharded for each in unit.params or ()]
        return {each.values.untyped_storage().data_ptr(): each.param for each in params if each.values.numel()}

    def before_gather(self) -> None:
        """Write what code has written to views to the shards, and let gathering wait for all writes."""
        self.access.flush()
        if self._has_changed:
            self._has_changed = False
            for unit in self._units:
                fsdp.await_writes(unit.group)

    def _before_use(self, read: Sequence[Any], changed: Sequence[Any]) -> None:
        """Let shards have what was written to their unsharded values, and reshard the units of those that change."""
        self._has_changed = self._has_changed or bool(changed)
        for unit in self._units if changed else ():
            if unit.has_one_of(changed):  # not while FSDP2 itself makes the unsharded parameters of another one
                fsdp.finish_gathering(unit.group)
        for unit in tuple(self.unsharded):
            if unit.has_one_of(changed):
                fsdp.reshard(unit.group)
                if unit in self.unsharded:
                    raise ConfigurationError(
                        "A shard was changed in a step in which its stage is unsharded. Change the parameter of the "
                        "module instead, or change it in a hook such as on_train_batch_end."
                    )
            elif unit.has_one_of(read):
                unit.copy_to_shards()


class _ParameterHooks:
    """Keeps hooks on the original parameters, and calls them when the unsharded parameters get their gradients.

    A hook gets the full gradient of this rank's batch, as under DDP. Hooks registered before the run are therefore
    called during it, hooks registered during the run stay after it, and their handles can remove them at any time.

    Args:
        originals: the parameter that each `FSDPParam` was created from.
    """

    def __init__(self, originals: dict[Any, Parameter]) -> None:
        self._originals = originals

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
        unsharded = unsharded_param(param)
        if unsharded is not None and not gradient_hooks(original):  # a step may have registered some on it
            share_gradient_hooks(unsharded, original)
        original.requires_grad_(shard.requires_grad)  # torch refuses hooks on frozen parameters
        handle: RemovableHandle = original.register_hook(hook)  # type: ignore[no-untyped-call]
        self.attach(param)
        return handle

    def attach(self, param: Any) -> None:
        """Let the unsharded parameter of `param`, if there is one, call the hooks."""
        unsharded, original = unsharded_param(param), self._originals[param]
        if unsharded is not None and gradient_hooks(original):
            if isinstance(unsharded, DTensor) or isinstance(original, DTensor) or unsharded.is_inference():
                refuse_hook(name_of(param), "register_hook")
            share_gradient_hooks(original, unsharded)


class ShownGradients:
    """Gives unsharded parameters the gradients of their shards, and the shards what code makes of these.

    A backward pass must find none of them, because FSDP2 would reduce them again: they are hidden when it begins. What
    it leaves on unsharded parameters is therefore not yet reduced, and everything else was assigned by code.
    """

    def __init__(self) -> None:
        self._is_watching = False
        self._passes = 0
        self._shown: dict[Any, Tensor | None] = {}

    def watch(self, after_pass: Callable[[], None], undo: ExitStack) -> None:
        """Hide gradients in backward passes, until `undo` is closed, and call `after_pass` after the outermost."""

        def begin(*_: Any) -> None:
            self.hide(tuple(self._shown))
            self._passes += 1

        def end(is_done: bool) -> None:
            self._passes -= 1
            if is_done and not self._passes:
                after_pass()

        self._is_watching = True
        undo.callback(check_backward_passes(begin, end))

    def show(self, params: Iterable[Any]) -> None:
        """Show the gradients of `FSDPParam`s that are unsharded, unless they have gradients that are not reduced."""
        if self._passes or not self._is_watching:
            return
        hidden = [param for param in params if param not in self._shown]
        with DisableTorchFunctionSubclass():
            for param in hidden:
                unsharded, gradient = unsharded_param(param), param.sharded_param.grad
                if unsharded is None or unsharded.grad is not None:
                    continue
                if gradient is not None:
                    if gradient.device != unsharded.device:  # offloaded
                        continue
                    unsharded.grad_dtype = gradient.dtype  # fp32 for 16 bits
                    unsharded.grad = gradient
                self._shown[param] = gradient

    def hide(self, params: Iterable[Any]) -> None:
        """Take the gradients of `FSDPParam`s away again, and give the shards those that code has assigned."""
        if not self._shown:
            return
        for param in params:
            if param not in self._shown:
                continue
            shown, unsharded, shard = self._shown.pop(param), unsharded_param(param), param.sharded_param
            assert unsharded is not None
            gradient: Tensor | None = unsharded.grad
            if gradient is not shown and (shard.grad is shown or shard.grad is None):
                gradient = gradient if gradient is None else gradient.to(shard.dtype)
                is_full = isinstance(gradient, Tensor) and not isinstance(gradient, DTensor)
                shard.grad = shard_like(shard, gradient) if is_full else gradient  # type: ignore[arg-type]
            if gradient is not None:
                unsharded.grad = None
                unsharded.grad_dtype = unsharded.dtype


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

    What differs is copied to the shards, unless something has written to these meanwhile. If the unsharded parameters
    are less precise, or the shards in host memory, writing to them is an error, which `check` raises: reading the
    comparison at once would make the host wait for the device.

    Args:
        group: the `FSDPParamGroup` of the unit.
        writes: knows all units, and which are unsharded.
    """

    def __init__(self, group: Any, writes: UserWrites) -> None:
        self.group = group
        self._writes = writes
        self._places = [
            (own_parameters(owner), name, param, owner)
            for param in group.fsdp_params
            for owner, name in owners_of(param)
        ]
        self.params: list[_Unsharded] | None = None
        """The parameters of the unit, once it has been unsharded."""
        self._exact: list[_Unsharded] = []
        self._own_parts: list[Tensor] = []
        self._inexact: list[_Unsharded] = []
        self._versions: list[int] = []
        self._trained: list[bool] = []
        self._handed_out: Tensor | None = None
        """The parts of the parameters that must not be written to, one after the other, as they were unsharded."""
        self._changed: Tensor | None = None
        """The first position in them that a step has changed, or -1."""
        fsdp.watch(group, self._before_gather, self._after_unshard, self._before_reshard)

    def has_one_of(self, tensors: Iterable[Any]) -> bool:
        """Return whether one of these DTensors has the memory of a shard of the unit."""
        storages = {identity_of(local_of(each).untyped_storage()) for each in tensors}
        shards = (local_of(param.sharded_param) for param in self.group.fsdp_params)
        return bool(storages) and any(identity_of(shard.untyped_storage()) in storages for shard in shards)

    def check(self) -> None:
        """Raise a `ConfigurationError` if a step has written to parameters that must not be written to."""
        self._check_places()
        position = -1 if self._changed is None else int(self._changed)
        if position >= 0:
            ends = accumulate(each.shard.numel() for each in self._inexact)
            number = next(number for number, end in enumerate(ends) if position < end)
            raise ConfigurationError(_explain_lost_write(self._inexact[number].param))

    def _check_places(self) -> None:
        """Raise a `ConfigurationError` if code has replaced or deleted a parameter, which FSDP2 would set again."""
        for table, name, param, owner in self._places:
            if not is_param_of(table.get(name), param):
                self._places = []  # so that the teardown does not fail as well
                refuse_replaced(name_of(param), owner)

    def _before_gather(self) -> None:
        self._writes.before_gather()
        self._check_places()

    def _after_unshard(self) -> None:
        if self.params is None:  # FSDP2 creates the unsharded parameters only once
            self.params = []
            for param in self.group.fsdp_params:
                parameter = unsharded_param(param)
                assert parameter is not None
                if not parameter.is_inference():
                    values = local_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()
                    self.params.append(_Unsharded(param, parameter, values))
                self._writes.hooks.attach(param)
            with_part = [each for each in self.params if each.shard.numel()]
            self._exact = [each for each in with_part if each.is_exact]
            self._own_parts = [each.own_part for each in self._exact]
            self._inexact = [each for each in with_part if not each.is_exact]
        self._versions = [version_of(each.shard) for each in self._exact]
        self._trained = [each.parameter.requires_grad for each in self.params]
        self._writes.unsharded[self] = None
        self._writes.gradients.show(self.group.fsdp_params)
        self._handed_out = self._parts_to_compare()

    def _before_reshard(self) -> None:
        self._check_places()
        self._writes.gradients.hide(self.group.fsdp_params)
        for each, trained in zip(self.params or (), self._trained, strict=True):
            if each.parameter.requires_grad != trained:  # FSDP2 copies that of the shard when it unshards again
                each.param.sharded_param.requires_grad_(not trained)
        self.copy_to_shards()
        now = self._parts_to_compare()
        if now is not None and self._handed_out is not None:
            differs = (now != self._handed_out) & (now == now)  # not where values are NaN
            first = torch.where(differs.any(), differs.int().argmax(), -1)
            self._changed = first if self._changed is None else torch.maximum(self._changed, first)
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
        for each, part, version in zip(self._exact, self._own_parts, self._versions, strict=True):
            if version_of(shard := each.shard) == version:
                shards.append(shard.data)  # which keeps the version of the shard
                parts.append(part)
        if shards:
            foreach_copy_(shards, parts)
            fsdp.await_writes(self.group)

    def _take_assigned(self, unsharded: _Unsharded) -> None:
        param, parameter, values = unsharded
        name, assigned = str(name_of(param)), parameter.detach()
        parameter.data = values
        check_assigned(name, parameter, assigned)
        owner = self._writes.memory().get(assigned.untyped_storage().data_ptr(), param)
        if owner is not param:
            raise ConfigurationError(shares_memory(name))
        values.copy_(assigned.clone())  # it may be a view of the values

    def _parts_to_compare(self) -> Tensor | None:
        parts = [each.own_part.reshape(-1) for each in self._inexact]
        return torch.cat(parts) if parts else None


def _explain_lost_write(param: Any) -> str:
    shard = local_of(param.sharded_param)
    dtype = str(param.param_dtype or shard.dtype).removeprefix("torch.")
    return (
        f"{name_of(param)} was changed while it was unsharded, in a step or in a method of its unit. An "
        f"unsharded parameter is a copy in {dtype} on the device of the step, of a shard in "
        f"{str(shard.dtype).removeprefix('torch.')} on {shard.device.type}. Change it in a hook such as "
        "on_train_batch_end or on_before_zero_grad, where parameters are sharded, or train with precision='32-true' or "
        "'bf16-true' and without offload."
    )
