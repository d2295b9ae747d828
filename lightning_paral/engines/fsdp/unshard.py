"""Unshard parameters around steps and calls, and make what code does to them there change the shards."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch import fsdp
from lightning_paral.compat.torch.autograd import (
    version_of,
)
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.fsdp import ForwardHooks, groups_of, unsharded_param
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.compat.torch.optimizers import foreach_copy_
from lightning_paral.compat.torch.tensors import identity_of, tree_leaves, tree_map_only
from lightning_paral.engines.fsdp.hook_access import HookAccess
from lightning_paral.engines.fsdp.refusals import check_assigned, refuse_replaced
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.requires_grad import first_names


class UserWrites:
    """Makes what user code writes to parameters of a sharded module change the shards, until `undo` is closed.

    While a unit is unsharded, its unsharded parameters have its values, and what is written to them is copied to the
    shards before these are read. A unit is resharded before one of its shards is written to.

    Args:
        root: the module.
        sharded: the submodules that `fully_shard` has sharded.
        mesh: the device mesh over whose last dimension they are sharded.
        undo: a stack.
    """

    def __init__(self, root: Module, sharded: Iterable[Any], mesh: DeviceMesh, undo: ExitStack) -> None:
        self.mesh = mesh
        self.keeps_unsharded = False
        """Whether units stay unsharded, as in a step of a pipeline, even if `state_dict` reshards them."""
        self.unsharded: dict[UnitReconciliation, None] = {}
        """The units that are unsharded."""
        self.memory: dict[int, Any] = {}
        """The `FSDPParam`s by the storages of their unsharded values, which FSDP2 frees and refills."""
        self._has_changed = False
        self.compares_gradients = True
        """Whether the ranks must have gradients by the same parameters in each backward pass."""
        self.order = 0
        """A checksum of the units that were gathered, and of the parameters that had gradients, in order."""
        places: dict[Any, list[tuple[Module, str]]] = {}
        for owner in root.modules():
            for name, parameter in own_parameters(owner).items():
                places.setdefault(parameter, []).append((owner, name))
        names = {parameter: name for name, parameter in root.named_parameters()}
        self.units = [
            UnitReconciliation(module, group, [places[each.sharded_param] for each in group.fsdp_params], self)
            for module in sharded
            for group in groups_of(module)
        ]
        self.numbers = {unit: number for number, unit in enumerate(self.units)}
        self.names = {each: names[each.sharded_param] for unit in self.units for each in unit.group.fsdp_params}
        """The names of the parameters by `FSDPParam`."""
        self.access = HookAccess(self.named_shards, self._before_use)
        undo.callback(self.access.remove)

    def named_shards(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the names and shards of the parameters."""
        for param, name in self.names.items():
            yield name, param.sharded_param

    def add_to_order(self, unit: "UnitReconciliation", *details: bool) -> None:
        """Note a collective of `unit`, with what it depends on."""
        self.order = hash((self.order, self.numbers[unit], *details))  # hashes of integers are equal on all ranks

    def check(self) -> None:
        """Raise a `ConfigurationError` for writes that were lost, and parameters that were replaced."""
        for unit in self.units:
            unit.check()

    def reshard(self) -> None:
        """Write what code has written to views to the shards, and reshard all units, whatever FSDP2 does with them."""
        if self.access.views:
            self.access.flush()
        for unit in tuple(self.unsharded):
            fsdp.reshard(unit.group)

    def check_gradients(self, shards: Collection[Any] | None = None) -> None:
        """Raise a `ConfigurationError` if a backward pass has left gradients on unsharded parameters.

        Args:
            shards: those whose parameters are checked; `None` for all.
        """
        params = (each.param for unit in self.units for each in unit.params or () if each.parameter.grad is not None)
        names = [self.names[each] for each in params if shards is None or each.sharded_param in shards]
        if names:
            raise ConfigurationError(
                f"A backward pass has left gradients that are not averaged over the ranks, by {first_names(names)}. "
                "FSDP reduces gradients only if the loss depends on what a module returns, and not only on what a hook "
                "or an attribute keeps of it. Return it, or train with paral_ddp."
            )

    def own_part(self, unsharded: Tensor) -> Tensor:
        """Return the view of `unsharded`, an unsharded parameter, that corresponds to this rank's nonempty shard."""
        return unsharded.chunk(self.mesh.size(-1))[self.mesh.get_local_rank(-1)]

    def param_of(self, value: Any) -> Any:
        """Return the `FSDPParam` whose unsharded memory `value` has; `None` if it is something else."""
        if not isinstance(value, Tensor):
            return None
        with torch.DisableTorchFunctionSubclass():  # tensor parallelism would gather a split tensor
            try:
                memory = (local_of(value) if isinstance(value, DTensor) else value).untyped_storage()
            except NotImplementedError:  # sparse tensors and those of transforms of torch.func have none
                return None
        return self.memory.get(identity_of(memory))

    def shard_of(self, value: Any) -> Any:
        """Return the shard of an unsharded parameter, and everything else as it is."""
        param = self.param_of(value)
        return value if param is None or unsharded_param(param) is not value else param.sharded_param

    def copy_returned(self, output: Any, module: Any) -> Any:
        """Return the output of a unit or a step with copies of weights in it, because their memory is freed.

        FSDP2 unshards `module` again before the backward passes of tensors, but does not find those in objects.
        """
        leaves = tree_leaves(output)
        for own in [vars(each) for each in leaves if hasattr(each, "__dict__") and not isinstance(each, Tensor)]:
            own.update({name: each.clone() for name, each in own.items() if self.param_of(each) is not None})
            for each in own.values():
                if isinstance(each, Tensor) and each.requires_grad and not each.is_leaf:
                    fsdp.unshard_before_backward(module, each)
        if all(self.param_of(each) is None for each in leaves):
            return output
        return tree_map_only(Tensor, lambda each: each if self.param_of(each) is None else each.clone(), output)

    def before_gather(self) -> None:
        """Write what code has written to views to the shards, and let gathering wait for all writes."""
        if self.access.views:
            self.access.flush()
        if self._has_changed:
            self._has_changed = False
            for unit in self.units:
                fsdp.await_writes(unit.group, self.mesh.device_type)

    def _before_use(self, read: Sequence[Any], changed: Sequence[Any]) -> None:
        """Let shards have what was written to their unsharded values, and reshard the units of those that change."""
        self._has_changed = self._has_changed or bool(changed)
        for unit in tuple(self.unsharded):
            if unit.has_one_of(changed):
                if self.keeps_unsharded:
                    raise ConfigurationError(
                        "A shard was changed in a step in which its stage is unsharded. Change the parameter of the "
                        "module instead, or change it in a hook such as on_train_batch_end."
                    )
                fsdp.reshard(unit.group)
            elif unit.has_one_of(read):
                unit.copy_to_shards()


class _Unsharded(NamedTuple):
    param: Any
    """The `FSDPParam`."""

    parameter: Any
    """The unsharded parameter, which is the same object each time."""

    values: Tensor
    """The memory into which FSDP2 gathers."""

    own_part: Any
    """The part of the values that this rank's shard has; `None` if the shard is empty."""

    is_exact: bool
    """Whether what is written to the values can be copied to the shard."""

    @property
    def shard(self) -> Tensor:
        return local_of(self.param.sharded_param)


class UnitReconciliation:
    """Compares this rank's part of the unsharded parameters of a unit with its shards, whenever the unit is resharded.

    What differs is copied to the shards, unless something has written to these meanwhile. If the unsharded parameters
    are less precise, or the shards in host memory, writing to them is an error, which `check` raises: reading the
    comparison at once would make the host wait for the device.

    Args:
        module: the module that `fully_shard` has sharded.
        group: an `FSDPParamGroup` of the module.
        places: the modules that have each parameter of `group`, and its name there: several if it is tied.
        writes: knows all units, and which are unsharded.
    """

    def __init__(self, module: Any, group: Any, places: list[list[tuple[Module, str]]], writes: UserWrites) -> None:
        self.module = module
        self.group = group
        self._writes = writes
        self._places = [
            (own_parameters(owner), name, param, owner)
            for param, of_param in zip(group.fsdp_params, places, strict=True)
            for owner, name in of_param
        ]
        self.params: list[_Unsharded] | None = None
        """The parameters of the unit, once it has been unsharded."""
        self._exact: list[_Unsharded] = []
        self._inexact: list[_Unsharded] = []
        self._versions: list[int] = []
        self._trained: list[bool] = []
        self._handed_out: Tensor | None = None
        """The bytes of the parts of the parameters that must not be written to, as they were unsharded."""
        self._changed: Tensor | None = None
        """Whether a step has changed them."""
        fsdp.watch(
            group,
            self._before_gather,
            self._after_unshard,
            self._before_reshard,
            self._after_forward,
            self._before_reduce,
        )

    def has_one_of(self, tensors: Iterable[Any]) -> bool:
        """Return whether one of these DTensors has the memory of a shard of the unit."""
        storages = {identity_of(local_of(each).untyped_storage()) for each in tensors}
        shards = (local_of(param.sharded_param) for param in self.group.fsdp_params)
        return bool(storages) and any(identity_of(shard.untyped_storage()) in storages for shard in shards)

    def check(self) -> None:
        """Raise a `ConfigurationError` if a step has written to parameters that must not be written to."""
        self._check_places()
        if self._changed is not None and self._changed:
            first, names = self._inexact[0], [self._writes.names[each.param] for each in self._inexact]
            raise ConfigurationError(
                f"One of these weights was changed while it was unsharded, in a step or in a method of its unit: "
                f"{first_names(names)}. There, it is a copy in {first.values.dtype} on the device of the step, of a "
                f"shard in {first.shard.dtype} on {first.shard.device.type}. Change it in a hook such as "
                "on_train_batch_end or on_before_zero_grad, where parameters are sharded, or train with "
                "precision='32-true' or 'bf16-true' and without offload."
            )

    def _check_places(self) -> None:
        """Raise a `ConfigurationError` if code has replaced or deleted a parameter, which FSDP2 would set again."""
        for table, name, param, owner in self._places:
            found = table.get(name)
            if found is None or (found is not param.sharded_param and found is not unsharded_param(param)):
                self._places = []  # so that the teardown does not fail as well
                refuse_replaced(self._writes.names[param], owner)

    def _before_gather(self) -> None:
        if self not in self._writes.unsharded:
            self._writes.before_gather()
            self._check_places()
            self._writes.add_to_order(self)

    def _before_reduce(self) -> None:
        # FSDP2 reduces the gradients that a rank has, in one message: other ranks have to have the same.
        if self._writes.compares_gradients:
            self._writes.add_to_order(self, *(each.parameter.grad is not None for each in self.params or ()))

    def _after_forward(self, output: Any) -> Any:
        return self._writes.copy_returned(output, self.module)

    def _after_unshard(self) -> None:
        if self.params is None:  # FSDP2 creates the unsharded parameters only once
            self.params = []
            for param in self.group.fsdp_params:
                parameter: Any = unsharded_param(param)
                if not parameter.is_inference():
                    shard = local_of(param.sharded_param)
                    values = local_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()
                    own_part = self._writes.own_part(values) if shard.numel() else None
                    is_exact = (shard.dtype, shard.device) == (values.dtype, values.device)
                    self.params.append(_Unsharded(param, parameter, values, own_part, is_exact))
                    self._writes.memory[identity_of(values.untyped_storage())] = param
            with_part = [each for each in self.params if each.own_part is not None]
            self._exact = [each for each in with_part if each.is_exact]
            self._inexact = [each for each in with_part if not each.is_exact]
        self._versions = [version_of(each.shard) for each in self._exact]
        self._trained = [each.parameter.requires_grad for each in self.params]
        self._writes.unsharded[self] = None
        self._handed_out = self._bytes_to_compare()

    def _before_reshard(self) -> bool:
        """Return whether the unit may be resharded, after the shards have got what code has written."""
        if self not in self._writes.unsharded:
            return True
        if self._writes.keeps_unsharded:
            return False
        self._check_places()
        for each, trained in zip(self.params or (), self._trained, strict=True):
            if each.parameter.requires_grad != trained:  # FSDP2 copies that of the shard when it unshards again
                each.param.sharded_param.requires_grad_(not trained)
        self.copy_to_shards()
        now = self._bytes_to_compare()
        if now is not None and self._handed_out is not None:
            differs = now.ne(self._handed_out).any()
            self._changed = differs if self._changed is None else self._changed | differs
            self._handed_out = None
        self._writes.unsharded.pop(self, None)
        return True

    @torch.no_grad()
    def copy_to_shards(self) -> None:
        """Copy this rank's part of the unsharded parameters to the shards that nothing else has written to."""
        for each in self.params or ():
            if not isinstance(each.parameter, DTensor) and not each.parameter.is_set_to(each.values):
                self._take_assigned(each)
        shards, parts = [], []
        for each, version in zip(self._exact, self._versions, strict=True):
            if version_of(shard := each.shard) == version:
                shards.append(shard.data)  # which keeps the version of the shard
                parts.append(each.own_part)
        if shards:
            foreach_copy_(shards, parts)
            fsdp.await_writes(self.group, self._writes.mesh.device_type)

    def _take_assigned(self, unsharded: _Unsharded) -> None:
        parameter, values, assigned = unsharded.parameter, unsharded.values, unsharded.parameter.detach()
        parameter.data = values
        others = [each.values for unit in self._writes.unsharded for each in unit.params or () if each is not unsharded]
        check_assigned(self._writes.names[unsharded.param], values, assigned, others)
        values.copy_(assigned.clone())  # it may be a view of the values

    def _bytes_to_compare(self) -> Tensor | None:
        parts = [each.own_part.reshape(-1).view(torch.uint8) for each in self._inexact]
        return torch.cat(parts) if parts else None


class RootUnshard:
    """Unshards the root's parameters while a step runs, and while the module is called outside steps.

    At all other times every parameter is sharded, so that hooks and callbacks read and change the values that are
    trained. A step of manual optimization runs backward passes and optimizers itself. Its code outside of calls of
    modules and of backward passes is such a time: parameters have the gradients that the optimizers use.

    Args:
        root: the sharded LightningModule.
        inner: the modules of the other units; all other direct children of the root belong to the root.
        writes: knows what user code has written.
    """

    def __init__(self, root: Any, inner: set[Module], writes: UserWrites) -> None:
        self._root = root
        self._writes = writes
        self._hooks = ForwardHooks(root)
        self._units = [unit for unit in writes.units if unit.module is root]
        self._depth = 0
        self._in_call = False
        self.reshards_before_backward = False
        """Whether all units are resharded between the training step and its backward pass, for hooks to see shards."""
        for module in (root, *(child for child in root.children() if child not in inner)):
            module.register_forward_pre_hook(self._before_call, prepend=True)
            module.register_forward_hook(self._after_call, always_call=True)

    def training_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a training step; that of manual optimization calls backward passes and optimizers itself."""
        is_manual = not self._root.automatic_optimization
        output = step(*args, **kwargs) if is_manual else self._run(step, args, kwargs)
        if is_manual or output is None or self.reshards_before_backward:
            self._writes.reshard()
        return output

    def evaluation_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a step without a backward pass."""
        output = self._run(step, args, kwargs)
        self._root.reshard()
        return output

    def _run(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._depth = 1
        self._hooks.before()
        output = self._hooks.after(step(*args, **kwargs))
        self._depth = 0
        return output

    def _before_call(self, module: Module, args: Any) -> None:
        if not all(unit in self._writes.unsharded for unit in self._units):  # otherwise, activations may be recomputed
            if self._depth:
                self._root.unshard()  # `state_dict` and `load_state_dict` reshard even within a step
            else:
                self._hooks.before()
                self._in_call = True
        self._depth += 1

    def _after_call(self, module: Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth == 0 and self._in_call:
            self._in_call = False
            output = self._hooks.after(output)
            self._writes.reshard()
        return output
