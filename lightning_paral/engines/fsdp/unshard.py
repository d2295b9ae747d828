"""Unshard parameters around steps and calls, and make what code does to them there change the shards."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from itertools import accumulate
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_paral.compat.torch import fsdp
from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass, check_backward_passes, version_of
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.fsdp import ForwardHooks, groups_of, name_of, pre_forward, unsharded_param
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.compat.torch.optimizers import foreach_copy_
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.compat.torch.tensors import identity_of
from lightning_paral.engines.fsdp.hook_access import HookAccess, shard_like
from lightning_paral.engines.fsdp.refusals import MIXED, check_assigned, refuse_replaced, shares_memory
from lightning_paral.errors import ConfigurationError

_LIBRARIES = ("torch", "transformers", "lightning", "torchmetrics")


class UserWrites:
    """Makes what user code writes to parameters of a sharded module change the shards, until `undo` is closed.

    While a unit is unsharded, its unsharded parameters have its values, and what is written to them is copied to the
    shards before these are read. A unit is resharded before one of its shards is written to.

    Args:
        groups: the `FSDPParamGroup`s of the module.
        in_step: returns whether a step is running.
        undo: a stack.
    """

    def __init__(self, groups: list[Any], in_step: Callable[[], bool], undo: ExitStack) -> None:
        self._params = [param for group in groups for param in group.fsdp_params]
        self.unsharded: dict[UnitReconciliation, None] = {}
        """The units that are unsharded."""
        self.shows_gradients = False
        """Whether unsharded parameters get the gradients of their shards. In backward passes they must not."""
        self._has_changed = False
        self._units = [UnitReconciliation(group, self) for group in groups]
        self.access = HookAccess(
            lambda: ((name_of(param), param.sharded_param) for param in self._params), in_step, self._before_use
        )
        undo.callback(self.access.remove)

    def check(self) -> None:
        """Raise a `ConfigurationError` for writes that were lost, and parameters that were replaced."""
        for unit in self._units:
            unit.check()

    def reshard(self) -> None:
        """Write what code has written to views to the shards, and reshard all units, whatever FSDP2 does with them."""
        if self.access.views:
            self.access.flush()
        for unit in tuple(self.unsharded):
            fsdp.reshard(unit.group)

    def show_gradients(self, show: bool) -> None:
        """Give unsharded parameters the gradients of their shards, or take these away again."""
        self.shows_gradients = show
        for unit in self.unsharded:
            if show:
                unit.show_gradients()
            else:
                unit.take_gradients()

    def have_gradients(self) -> bool:
        """Return whether a backward pass has left gradients on unsharded parameters, which are not reduced."""
        return any(each.parameter.grad is not None for unit in self.unsharded for each in unit.params or ())

    def shards(self) -> dict[Any, Any]:
        """Return the shards by the unsharded parameters."""
        return {unsharded_param(each): each.sharded_param for each in self._params}

    def memory(self) -> dict[int, Any]:
        """Return the `FSDPParam`s that are unsharded, by the address of their unsharded values."""
        params = [each for unit in self.unsharded for each in unit.params or ()]
        return {each.values.untyped_storage().data_ptr(): each.param for each in params if each.values.numel()}

    def before_gather(self) -> None:
        """Write what code has written to views to the shards, and let gathering wait for all writes."""
        if self.access.views:
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
            for owner, name in fsdp.owners_of(param)
        ]
        self.params: list[_Unsharded] | None = None
        """The parameters of the unit, once it has been unsharded."""
        self._exact: list[_Unsharded] = []
        self._own_parts: list[Tensor] = []
        self._inexact: list[_Unsharded] = []
        self._versions: list[int] = []
        self._trained: list[bool] = []
        self._shown: list[tuple[_Unsharded, Tensor | None]] = []
        """The parameters that have the gradients of their shards. All others have gradients that are not reduced."""
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

    def show_gradients(self) -> None:
        """Give the parameters the gradients of their shards, for code that reads those of earlier backward passes."""
        with DisableTorchFunctionSubclass():
            for each in self.params or ():
                gradient = each.param.sharded_param.grad
                if each.parameter.grad is not None or (gradient is not None and gradient.device != each.values.device):
                    continue
                if gradient is not None:
                    each.parameter.grad_dtype = gradient.dtype  # fp32 for 16 bits
                    each.parameter.grad = gradient
                self._shown.append((each, gradient))

    def take_gradients(self) -> None:
        """Take the gradients away from the parameters, and give the shards those that code has assigned."""
        shown, self._shown = self._shown, []
        for each, before in shown:
            gradient, shard = each.parameter.grad, each.param.sharded_param
            if gradient is not before:
                is_full = gradient is not None and not isinstance(gradient, DTensor)
                shard.grad = shard_like(shard, gradient.to(shard.dtype)) if is_full else gradient
            if gradient is not None:
                each.parameter.grad = None
                each.parameter.grad_dtype = each.parameter.dtype

    def _check_places(self) -> None:
        """Raise a `ConfigurationError` if code has replaced or deleted a parameter, which FSDP2 would set again."""
        for table, name, param, owner in self._places:
            if not fsdp.is_param_of(table.get(name), param):
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
            with_part = [each for each in self.params if each.shard.numel()]
            self._exact = [each for each in with_part if each.is_exact]
            self._own_parts = [each.own_part for each in self._exact]
            self._inexact = [each for each in with_part if not each.is_exact]
        self._versions = [version_of(each.shard) for each in self._exact]
        self._trained = [each.parameter.requires_grad for each in self.params]
        self._writes.unsharded[self] = None
        if self._writes.shows_gradients:
            self.show_gradients()
        self._handed_out = self._parts_to_compare()

    def _before_reshard(self) -> None:
        self._check_places()
        self.take_gradients()
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
    return (
        f"{name_of(param)} was changed while it was unsharded, in a step or in a method of its unit, where it is "
        f"a copy in {param.param_dtype or shard.dtype} on the device of the step, of a shard in {shard.dtype} on "
        f"{shard.device.type}. Change it in a hook such as on_train_batch_end or on_before_zero_grad, where parameters "
        "are sharded, or train with precision='32-true' or 'bf16-true' and without offload."
    )


def unshard_around_methods(module: Any, undo: ExitStack) -> None:
    """Unshard a unit around `forward` and its other public methods, until `undo` is closed.

    FSDP2 unshards only around `forward`, and reshards as soon as a nested call ends, as does torch's
    `register_fsdp_forward_method`. Here, the unit stays unsharded until the outermost call ends.
    """
    names = _public_methods(module)
    if not names:
        return
    hooks, depth = ForwardHooks(module), 0

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                if depth == 1:
                    args, kwargs = pre_forward(hooks.state, module, args, kwargs)
                output = method(*args, **kwargs)
            finally:
                depth -= 1
            return output if depth else hooks.after(output)

        return call

    undo.callback(replace_attributes(module, {name: around(getattr(module, name)) for name in ("forward", *names)}))


def _public_methods(module: Module) -> list[str]:
    """Return the names of the public methods that the user's classes define for `module`."""
    names: dict[str, None] = {}
    for base in type(module).__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES or base is object:
            continue
        for name, value in vars(base).items():
            public = not name.startswith("_") and not hasattr(Module, name)
            if public and isinstance(value, FunctionType) and not inspect.isgeneratorfunction(value):
                names[name] = None
    return list(names)


class RootUnshard:
    """Unshards the root's parameters while a step runs, and while the module is called outside steps.

    At all other times every parameter is sharded, so that hooks and callbacks read and change the values that are
    trained.

    Args:
        root: the sharded LightningModule.
        inner: the modules of the other units; all other direct children of the root belong to the root.
        writes: knows what user code has written.
    """

    def __init__(self, root: Any, inner: set[Module], writes: UserWrites) -> None:
        self._root = root
        self._writes = writes
        self._hooks = ForwardHooks(root)
        self._depth = 0
        self._num_passes = 0
        self._in_optimizer = False
        for module in (root, *(child for child in root.children() if child not in inner)):
            module.register_forward_pre_hook(self._before_call, prepend=True)
            module.register_forward_hook(self._after_call, always_call=True)

    @property
    def is_running(self) -> bool:
        """Whether a step or a call of the module is running, and in it no optimizer."""
        return self._depth > 0 and not self._in_optimizer

    def training_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a training step of automatic optimization, whose backward pass follows it."""
        self._enter()
        pre_forward(self._hooks.state, self._root)
        output = step(*args, **kwargs)
        if isinstance(output.get("loss") if isinstance(output, Mapping) else output, DTensor):
            raise RuntimeError(MIXED)
        output = self._hooks.after(output)
        self._depth = 0
        if output is None:
            self._writes.reshard()
        return output

    def manual_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a training step of manual optimization, which calls backward passes and optimizers itself."""
        self._enter()
        self._root.unshard()
        output = step(*args, **kwargs)
        self._depth = 0
        self._writes.reshard()  # not after an error, which an error of its own would hide
        return output

    def evaluation_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a step without a backward pass."""
        self._enter()
        pre_forward(self._hooks.state, self._root)
        output = self._hooks.after(step(*args, **kwargs))
        self._depth = 0
        self._root.reshard()
        return output

    def watch_backward_passes(self, undo: ExitStack) -> None:
        """Hide the gradients of shards in backward passes, and reduce what FSDP2 does not, until `undo` is closed."""

        def begin(*_: Any) -> None:
            if not self._num_passes:
                self._writes.show_gradients(False)
            self._num_passes += 1

        def end(is_done: bool) -> None:
            self._num_passes -= 1
            if not self._num_passes:
                if is_done:
                    self._after_pass()
                self._writes.show_gradients(True)

        self._writes.shows_gradients = True
        undo.callback(check_backward_passes(begin, end))

    def _after_pass(self) -> None:
        if self._writes.have_gradients() and all(group.reduce_grads for group in groups_of(self._root)):
            self._hooks.end_backward()  # FSDP2 has not noticed the pass, because no unit computed its loss
        if self._depth:  # the pass is in a step, and may have resharded the root
            self._root.unshard()

    def before_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reshard all parameters, because `optimizer` changes the shards; its closure finds them as in the step.

        Returns:
            the arguments of the optimizer's step with another closure, as from a step pre-hook of torch.
        """
        if not any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
            return None
        self._set_in_optimizer(True)
        return (optimizer, *map(self._as_in_step, args[1:])), {name: self._as_in_step(kwargs[name]) for name in kwargs}

    def after_optimizer(self, *_: Any) -> None:
        """In a step, unshard the root's parameters again."""
        if self._in_optimizer:
            self._set_in_optimizer(False)

    def _set_in_optimizer(self, in_optimizer: bool) -> None:
        self._in_optimizer = in_optimizer
        if in_optimizer:
            self._writes.reshard()
        elif self._depth:
            self._root.unshard()

    def _as_in_step(self, closure: Any) -> Any:
        if not callable(closure):
            return closure

        @wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._set_in_optimizer(False)
            try:
                return closure(*args, **kwargs)
            finally:
                self._set_in_optimizer(True)

        return call

    def _enter(self) -> None:
        self._depth, self._in_optimizer = 1, False  # also if an error ended the last step

    def _before_call(self, module: Module, args: Any) -> None:
        if self._depth == 0:
            pre_forward(self._hooks.state, self._root)
        elif not all(group.is_unsharded for group in groups_of(self._root)):
            self._root.unshard()  # `state_dict` and `load_state_dict` reshard even within a step
        self._depth += 1

    def _after_call(self, module: Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth == 0:
            output = self._hooks.after(output)
            self._root.reshard()
        return output
