"""Shard a module unit by unit, in place, and restore it after the run."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torchmetrics import Metric

from lightning_paral.comm.coalescing import broadcast
from lightning_paral.comm.reduce_scatter import DirectReduceScatter
from lightning_paral.compat.lightning.strategies import set_device_everywhere
from lightning_paral.compat.torch.dtensor import local_of
from lightning_paral.compat.torch.fsdp import (
    forget,
    groups_of,
    initialize,
    prepare_class,
    reshard,
    unshard_replicas_to_plain,
)
from lightning_paral.compat.torch.modules import BatchNorm, InstanceNorm, hook_tables, own_buffers, own_parameters
from lightning_paral.engines.fsdp.refusals import explanation, refuse_hooks
from lightning_paral.engines.fsdp.unshard import UserWrites
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.checks import explain
from lightning_paral.model.gradients import full_copy
from lightning_paral.model.units import Unit, Units, partition

LEFT_SHARDED = "_lightning_paral_left_sharded"
"""Attribute that is set on a module that could not be restored; its value is the reason."""
SMALL_BYTES = 25 * 2**20  # the size of a bucket of DDP
_SMALL_PART = 16
_SHARDED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes that FSDP2 trains, and gloo sends, in every version of torch: not float8, integers or complex numbers."""


class SplitParameters(Protocol):
    """Splits layers over the tensor ranks."""

    def split(self, parts: Sequence[Module], whole: Iterable[Parameter]) -> None:
        """Replace the parameters of `parts` by DTensors on the tensor ranks, except those of `whole`."""

    def install(self) -> None:
        """Make the layers compute with this rank's part."""


class Sharding:
    """Shards the units of a module with `fully_shard`, in place: what is the same for all engines that use it.

    Args:
        root: the module.
        mesh: the device mesh of the data ranks; units are sharded over its last dimension.
        split: splits layers over the tensor ranks; `None` without these. Parameters that the tensor ranks have in full
            are unsharded to ordinary tensors.
    """

    def __init__(self, root: Module, mesh: DeviceMesh, split: SplitParameters | None) -> None:
        self.root = root
        self.split = split
        self._mesh = mesh
        self._sharded: list[Any] = []
        self._groups: list[Any] = []
        self._units: Units | None = None
        self._snapshots: list[ModuleSnapshot] = []
        self._originals = list(root.named_parameters())
        self.undo = ExitStack()
        """Undoes the changes outside of the submodules, and removes hooks on parameters."""
        self.writes: UserWrites
        """Lets user code change the shards; set when all units are sharded."""

    def original_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the names and parameters from before sharding. They are empty while the module is sharded."""
        yield from self._originals

    @property
    def _params(self) -> list[Any]:
        return [param for group in self._groups for param in group.fsdp_params]

    def set_units(self, units: Units) -> None:
        """Set the units of the module.

        Raises:
            ConfigurationError: the trained parameters of a unit have different dtypes.
        """
        self._units = units
        names = {parameter: name for name, parameter in self._originals}
        for unit in units.bottom_up:
            check_dtypes(unit, names)

    def _prepare(self, parts: Sequence[Module], whole: Iterable[Parameter]) -> None:
        for parameter in [parameter for part in parts for parameter in own_parameters(part).values()]:
            if parameter is not None and not isinstance(parameter, DTensor) and not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        if self.split is not None:
            self.split.split(parts, whole)

    def _fully_shard(self, module: Module, ignored: set[Any], **options: Any) -> None:
        prepare_class(module)
        fully_shard(module, mesh=self._mesh, ignored_params=ignored, **options)
        assert isinstance(module, FSDPModule)
        if self.split is not None:
            for param in [param for group in groups_of(module) for param in group.fsdp_params]:
                unshard_replicas_to_plain(param)
        self._sharded.append(module)

    def _let_code_write(self) -> None:
        initialize(self.root)
        self._groups = [group for module in self._sharded for group in groups_of(module)]
        self.writes = UserWrites(self.root, self._sharded, self._mesh, self.undo)
        for module in self._sharded:
            if self._mesh.device_type == "cpu":
                module.set_custom_reduce_scatter(DirectReduceScatter())
        refuse_hooks(
            lambda: chain(self.root.named_parameters(), self.writes.named_shards(), self._originals), self.undo
        )

    def explanation(self, error: BaseException) -> str | None:
        """Return what caused `error` and what to do; `None` if sharding has not caused it."""
        return None if self._units is None else explanation(error, self._units)

    def explain(self, error: BaseException) -> None:
        """Prepend an explanation to the message of `error`, which a hook raised, if sharding has caused it."""
        explain(error, self.explanation)

    def restore(self, obstacle: str | None) -> dict[Parameter, Parameter]:
        """Give the modules back their own parameters, with full values on the CPU. *Collective* unless `obstacle`.

        Args:
            obstacle: the reason why the modules stay sharded; `None` if they do not.

        Returns:
            dict[Parameter, Parameter]: the modules' own parameters by sharded parameter; empty if they stay sharded.
        """
        self.undo.close()
        for group in self._groups:  # a failed step may have left some unsharded
            reshard(group)
        originals: dict[Parameter, Parameter] = {}
        if obstacle is not None:
            vars(self.root)[LEFT_SHARDED] = obstacle
            return originals
        for snapshot in self._snapshots:
            originals |= snapshot.restore()
        return originals


def stays_fp32(module: Module) -> bool:
    """Return whether the parameters of `module` stay fp32 under mixed precision, like its running statistics.

    Under DDP they are fp32 as well, because autocast does not cast them.
    """
    return isinstance(module, BatchNorm | InstanceNorm)


def move_metrics(root: Module, device: torch.device) -> None:
    """Set `root.device` and move the states of metrics to `device`; `root.to` would also move offloaded shards."""
    set_device_everywhere(root, device)
    for part in root.modules():
        if isinstance(part, Metric):
            part.to(device)


def own_parts(module: Module) -> list[Module]:
    """Return `module` and its submodules, except those that are already sharded and everything inside them."""
    parts: dict[Module, None] = {}

    def visit(part: Module) -> None:
        parts[part] = None
        for child in part.children():
            if child not in parts and not isinstance(child, FSDPModule):
                visit(child)

    visit(module)
    return list(parts)


def own_tensors(parts: list[Module]) -> list[Tensor]:
    """Return the parameters and buffers of `parts`, except those that are sharded or have no values."""
    tensors: dict[int, Tensor] = {}
    for part in parts:
        for tensor in (*own_parameters(part).values(), *own_buffers(part).values()):
            if tensor is not None and not isinstance(tensor, DTensor) and not tensor.is_meta:
                tensors[id(tensor)] = tensor
    return list(tensors.values())


# The tensors of a unit, before it is sharded


def leave_small_to_root(units: Units) -> Units:
    """Leave units to the root that are less than a 16th of the module, unless together they have more than 25 MiB.

    They stay units as well if the root would then have trained parameters of several dtypes, which is an error.

    The root is unsharded throughout a step. A unit of a few kilobytes saves less memory than its all-gathers cost time.
    """
    num_bytes = sum(unit.num_bytes for unit in units.bottom_up)
    candidates = [unit for unit in units.inner if not isinstance(unit.module, FSDPModule)]  # sharded by the user
    small = {unit.module for unit in candidates if unit.num_bytes < num_bytes / _SMALL_PART}
    if sum(unit.num_bytes for unit in units.inner if unit.module in small) > SMALL_BYTES:
        return units
    fewer = partition(units.root.module, {unit.module for unit in units.inner} - small)
    return units if len(_trained_dtypes(fewer.root)) > 1 else fewer


def unshardable_parameters(module: Module) -> list[Parameter]:
    """Return the parameters of `module` that every rank has in full: 0-dimensional and empty ones, and other dtypes."""
    return [parameter for parameter in module.parameters() if not _can_be_sharded(parameter)]


def _can_be_sharded(parameter: Parameter) -> bool:
    has_rows = parameter.dim() > 0 and parameter.numel() > 0
    return has_rows and (isinstance(parameter, DTensor) or parameter.dtype in _SHARDED)


def broadcast_on(device: torch.device, tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Broadcast a unit's `tensors` from the first rank of `group` on `device`, before the unit is sharded there.

    This communicates over the network of the devices, and needs no more device memory than FSDP2 needs for the unit.

    *Collective* over `group`; `None` is the world.
    """
    tensors = list(tensors)
    move_or_allocate(device, tensors, is_source=dist.get_rank(group) == 0)
    broadcast(tensors, group)


@torch.no_grad()
def move_or_allocate(device: torch.device, tensors: Iterable[Tensor], *, is_source: bool) -> None:
    """Move `tensors` to `device` if this rank is the source. Otherwise only allocate memory there for their values.

    Parameters are reallocated on the other ranks even if `device` is the CPU, because `from_pretrained` may have mapped
    them privately from a file. A page of such a mapping, once written to, stays in memory as long as the file is
    mapped, so that each rank would end up with the full model in memory.
    """
    for tensor in tensors:
        if is_source:
            tensor.data = tensor.data.to(device)
        elif device.type != "cpu" or isinstance(tensor, Parameter):
            tensor.data = torch.empty_like(tensor.data, device=device)


def check_dtypes(unit: Unit, names: dict[Any, str]) -> None:
    """Raise a `ConfigurationError` if the trained parameters of `unit`, which have `names`, have different dtypes."""
    trained = _trained_dtypes(unit)
    if len(trained) > 1:
        found = ", ".join(f"{names[one]} ({str(dtype).removeprefix('torch.')})" for dtype, one in trained.items())
        raise ConfigurationError(
            f"Trained parameters of one unit must have the same dtype, but in {unit.name or 'the root'} there are "
            f"{found}. Convert them, or choose units=[...] so that they are in different units."
        )


def _trained_dtypes(unit: Unit) -> dict[torch.dtype, Parameter]:
    """Return the dtypes of the trained parameters of `unit` that can be sharded, each with the first parameter."""
    trained: dict[torch.dtype, Parameter] = {}
    for parameter in unit.parameters:
        if parameter.requires_grad and _can_be_sharded(parameter):
            trained.setdefault(parameter.dtype, parameter)
    return trained


# The module before and after the run


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

    def mark_added(self) -> None:
        """Record the attributes and hooks that sharding has added to each submodule, for `restore` to remove."""
        for module, before in self._hooks.items():
            hooks = {name: keys - before[name] for name, keys in _hooks_of(module).items()}
            self._added[module] = set(vars(module)) - self._attributes[module], hooks

    def restore(self) -> dict[Parameter, Parameter]:
        """Restore the submodules, with full parameters on CPU; return these by sharded parameter. *Collective*."""
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
        original.data = full_copy(current).to("cpu")
    else:
        original.data = current.detach().to("cpu", copy=True)
    original.requires_grad_(current.requires_grad)
    original.grad = None
    return original


def check_module(module: Module) -> None:
    """Raise a `ConfigurationError` if an earlier run left `module` sharded."""
    if hasattr(module, LEFT_SHARDED):
        raise ConfigurationError(
            f"{type(module).__name__} was left sharded by an earlier run, which could not gather it: "
            f"{getattr(module, LEFT_SHARDED)}. Load a checkpoint into a new module."
        )
