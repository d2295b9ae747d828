"""Shard a module unit by unit, in place."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torchmetrics import Metric

from lightning_paral.compat.lightning.strategies import set_device_everywhere
from lightning_paral.compat.torch.fsdp import (
    groups_of,
    initialize,
    keep_dtype,
    prepare_class,
    reset_iteration,
    unshard_replicas_to_plain,
)
from lightning_paral.compat.torch.modules import BatchNorm, InstanceNorm, own_buffers, own_parameters
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.fsdp.gradients import AveragedGradients, DirectReduceScatter
from lightning_paral.engines.fsdp.options import FSDPOptions
from lightning_paral.engines.fsdp.precision import match_inputs
from lightning_paral.engines.fsdp.restore import ModuleSnapshot
from lightning_paral.engines.fsdp.units import broadcast_on, check_dtypes, unshardable_parameters
from lightning_paral.engines.fsdp.unshard import RootUnshard, UnitUnshard, public_methods
from lightning_paral.engines.fsdp.user_writes import UserWrites
from lightning_paral.model.deferred.construction import DeferredConstruction
from lightning_paral.model.units import Unit, Units


class ShardedModule:
    """Shards a module in place, and restores it.

    Args:
        units: the units of the module.
        options: the options of the strategy.
        dims: the arrangement of the ranks.
        mesh: the device mesh of the data ranks; the module is sharded over its last dimension.
        device: device of this rank.
        policy: the dtypes in which parameters are unsharded and gradients reduced.
        deferred: computes the values of parameters that have none yet; `None` if all have values.
        split: replaces the parameters of modules by DTensors on the tensor ranks, except for some; `None` without
            tensor ranks. Parameters that these ranks have in full are unsharded to ordinary tensors.
    """

    def __init__(
        self,
        units: Units,
        options: FSDPOptions,
        dims: ParallelDims,
        mesh: DeviceMesh,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        deferred: DeferredConstruction | None,
        split: Callable[[Sequence[Module], Iterable[Parameter]], None] | None,
    ) -> None:
        self.root = units.root.module
        self.units = units
        self._options = options
        self._dims = dims
        self._mesh = mesh
        self._device = device
        self._policy = policy
        self._deferred = deferred
        self._split = split
        self._snapshot = ModuleSnapshot(self.root.modules())
        self._sharded: list[Any] = []
        self._undo = ExitStack()
        """Undoes the changes outside of the submodules, and removes hooks on parameters."""
        self._originals = list(self.root.named_parameters())
        self.writes: UserWrites
        """Lets user code change the shards; set by `shard`."""

    def shard(self) -> None:
        """Shard the module, unit by unit. *Collective* over the world.

        Raises:
            ConfigurationError: the trained parameters of a unit have different dtypes.
        """
        try:
            self._shard_all()
        finally:
            self._snapshot.mark_added()

    def _shard_all(self) -> None:
        units = self.units
        names = {parameter: name for name, parameter in self._originals}
        for unit in units.bottom_up:
            check_dtypes(unit, names)
        self._compute_values_of_sharded()
        for unit in units.bottom_up:
            if isinstance(unit.module, FSDPModule):  # by the user, in `configure_model`
                self._sharded.append(unit.module)
            elif unit is units.root or not any(isinstance(parameter, DTensor) for parameter in unit.parameters):
                self._shard(unit)
        if self._policy.param_dtype is not None and self._device.type == "cpu":
            match_inputs(self.root)
        self.replicated = unshardable_parameters(self.root, self._mesh.size(-1))
        group = self._dims.data_group() if self._dims.num_ranks > 1 else None
        self._undo.callback(AveragedGradients(self.replicated, self._dims.data_size, group).remove)
        _move_metrics(self.root, self._device)
        self._install_communication()
        self._unshard_around_calls()

    def _unshard_around_calls(self) -> None:
        inner = {unit.module for unit in self.units.inner}
        calls = [UnitUnshard(module, names) for module in self._sharded[:-1] if (names := public_methods(module))]
        initialize(self.root)
        groups = [group for module in self._sharded for group in groups_of(module)]
        for param in [param for group in groups for param in group.fsdp_params]:
            keep_dtype(param)
        self.writes = UserWrites(
            self.root,
            groups,
            self._snapshot.original,
            self._originals,
            lambda: self.root_unshard.is_running,
            self._undo,
        )
        self.root_unshard = RootUnshard(self._sharded[-1], calls, inner, self.writes)

    def original_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the names and parameters from before sharding. They are empty while the module is sharded."""
        yield from self._originals

    @property
    def num_bytes(self) -> int:
        """The size of all parameters, unsharded, in bytes."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.root.parameters())

    def set_gradient_sync(self, reduce: bool, all_reduce: bool) -> None:
        """Set whether backward passes reduce gradients over the shard group, and then over the replicas."""
        root: Any = self.root
        root.set_requires_gradient_sync(reduce)
        root.set_requires_all_reduce(all_reduce)

    def reshard(self) -> None:
        """Reshard the parameters that a failed step has left unsharded."""
        if isinstance(self.root, FSDPModule):
            reset_iteration(self.root)

    def restore(self, obstacle: str | None) -> dict[Parameter, Parameter]:
        """Restore the module as it was before `shard`. *Collective* over the ranks that hold shards.

        Args:
            obstacle: the reason why parameters stay sharded; `None` if they do not.

        Returns:
            dict[Parameter, Parameter]: the module's own parameters by sharded parameter; empty if they stay sharded.
        """
        self._undo.close()
        self.reshard()
        return self._snapshot.restore(obstacle)

    def _compute_values_of_sharded(self) -> None:
        """Compute the values of modules that the user sharded in `configure_model`, one module at a time."""
        if self._deferred is None:
            return
        for module in [module for module in self.root.modules() if isinstance(module, FSDPModule)]:
            parts = list(module.modules())
            self._deferred.fill(parts)
            self._snapshot.record_values(parts)

    def _shard(self, unit: Unit) -> None:
        module = unit.module
        parts = _own_parts(module)
        if self._deferred is not None:
            self._deferred.fill(parts)
            self._snapshot.record_values(parts)
        dims = self._dims
        if dims.data_size * dims.tensor > 1:
            group = dims.data_group() if dims.tensor == 1 else dims.stage_group()
            broadcast_on(self._device, _own_tensors(parts), group)
        replicated = set(unshardable_parameters(module, self._mesh.size(-1)))
        for each in replicated:
            each.data = each.data.to(self._device)
        for part in parts:
            for parameter in own_parameters(part).values():
                if parameter is not None and not isinstance(parameter, DTensor) and not parameter.is_contiguous():
                    parameter.data = parameter.data.contiguous()
        if self._split is not None:
            self._split(parts, replicated)
        if self._policy.param_dtype is not None:
            for part in parts:
                if _stays_fp32(part) and next(part.parameters(), None) is not None and part is not module:
                    self._fully_shard(part, MixedPrecisionPolicy(), replicated)
        policy = MixedPrecisionPolicy() if _stays_fp32(module) else self._policy
        self._fully_shard(module, policy, replicated)
        self._snapshot.free_full(parts)

    def _fully_shard(self, module: Module, policy: MixedPrecisionPolicy, ignored: set[Any]) -> None:
        prepare_class(module)
        offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if self._options.offload else OffloadPolicy()
        fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=self._options.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=ignored,
        )
        assert isinstance(module, FSDPModule)
        if self._split is not None:
            for param in [param for group in groups_of(module) for param in group.fsdp_params]:
                unshard_replicas_to_plain(param)
        self._sharded.append(module)

    def _install_communication(self) -> None:
        if self._device.type == "cpu":
            for module in self._sharded:
                module.set_custom_reduce_scatter(DirectReduceScatter())
        if self._options.prefetch is not None:
            in_order: list[Any] = [module for module in self.root.modules() if module in self._sharded[:-1]]
            for number, module in enumerate(in_order):
                ahead, behind = number + 1, max(0, number - self._options.prefetch)
                module.set_modules_to_forward_prefetch(in_order[ahead : ahead + self._options.prefetch])
                module.set_modules_to_backward_prefetch(in_order[behind:number][::-1])


def _stays_fp32(module: Module) -> bool:
    """Return whether the parameters of `module` stay fp32 under mixed precision, like its running statistics.

    Under DDP they are fp32 as well, because autocast does not cast them.
    """
    return isinstance(module, BatchNorm | InstanceNorm)


def _move_metrics(root: Module, device: torch.device) -> None:
    """Set `root.device` and move the states of metrics to `device`; `root.to` would also move offloaded shards."""
    set_device_everywhere(root, device)
    for part in root.modules():
        if isinstance(part, Metric):
            part.to(device)


def _own_parts(module: Module) -> list[Module]:
    """Return `module` and its submodules, except those that are already sharded and everything inside them."""
    parts: dict[Module, None] = {}

    def visit(part: Module) -> None:
        parts[part] = None
        for child in part.children():
            if child not in parts and not isinstance(child, FSDPModule):
                visit(child)

    visit(module)
    return list(parts)


def _own_tensors(parts: list[Module]) -> list[Tensor]:
    tensors: dict[int, Tensor] = {}
    for part in parts:
        for tensor in (*own_parameters(part).values(), *own_buffers(part).values()):
            if tensor is not None and not isinstance(tensor, DTensor) and not tensor.is_meta:
                tensors[id(tensor)] = tensor
    return list(tensors.values())
