"""Restore a module after a run: its classes, hooks and parameters, with full values in host memory."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.checkpoint.dtensor_chunks import chunks_by_rank
from lightning_paral.checkpoint.layout import chunks_of_flat_range
from lightning_paral.checkpoint.shards import flat
from lightning_paral.compat.torch.fsdp import forget
from lightning_paral.compat.torch.modules import hook_tables, own_parameters
from lightning_paral.compat.torch.process_groups import all_gather_single
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.model.host_memory_check import host_memory_shortage


class GatherToHost:
    """Gathers the chunks of sharded tensors into full tensors in host memory. *Collective* over `group`.

    Args:
        group: the ranks that call it: all ranks, or those that together hold one replica of the model.
        ranks: the global ranks of `group`, in its order.
        on_host: whether `group` communicates only CPU tensors.
    """

    piece_bytes = 2**26
    """Number of bytes of a tensor to gather at a time."""

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], on_host: bool = False) -> None:
        self._group = group
        self._ranks = ranks
        self._on_host = on_host

    @torch.no_grad()
    def __call__(self, tensor: Any) -> Tensor:
        """Return the full value of `tensor`, a DTensor, on CPU: the GPU may lack memory for it.

        If `tensor` is on the meta device, return a full meta tensor.

        Raises:
            CheckpointError: the local tensors of `tensor` are not chunks of it.
        """
        local = tensor.to_local()
        if local.is_meta:
            return torch.empty(tensor.shape, dtype=local.dtype, device="meta")
        # By index in the group. The other ranks of the group hold the same chunks.
        chunks = {self._ranks.index(rank): chunk for rank, chunk in chunks_by_rank(tensor).items()}
        full, values = torch.empty(tensor.shape, dtype=local.dtype), flat(local)
        num_elements = max(chunk.numel for chunk in chunks.values())
        step = max(1, self.piece_bytes // (len(self._ranks) * local.element_size()))
        for start in range(0, num_elements, step):
            gathered = self._gather(values[start : start + step], min(step, num_elements - start))
            for index, chunk in chunks.items():
                position = 0
                for part in chunks_of_flat_range(chunk.sizes, start, min(start + step, chunk.numel)):
                    piece = gathered[index, position : position + part.numel]
                    full[chunk.index][part.index].copy_(piece.view(part.sizes))
                    position += part.numel
        return full

    def _gather(self, own: Tensor, size: int) -> Tensor:
        """Return the elements of all ranks of the group, padded to `size`, in shape `[number of ranks, size]`."""
        own = own.cpu() if self._on_host else own
        padded = own.new_zeros(size)
        padded[: len(own)].copy_(own)
        pieces = own.new_empty((len(self._ranks), size))
        # As bytes: gloo supports neither float8 nor int16.
        as_bytes = [tensor.view(-1).view(torch.uint8) for tensor in (pieces, padded)]
        all_gather_single(*as_bytes, group=self._group)
        return pieces.cpu()


def gather_at_end(dims: ParallelDims, num_bytes: int, num_local_ranks: int) -> GatherToHost | str:
    """Return a function that gathers parameters, or a message if a node lacks memory for them. *Collective*.

    Args:
        dims: the arrangement of the ranks.
        num_bytes: the size of all parameters, unsharded, in bytes.
        num_local_ranks: the number of ranks per node. Each of them gathers all parameters.
    """
    shortage = host_memory_shortage(num_bytes, num_local_ranks)
    if shortage is not None:
        return shortage
    group = dims.replica_group() or dist.group.WORLD
    assert group is not None
    return GatherToHost(group, dims.replica_ranks)


def gather_after_failure(reachable: RankGroup | None) -> GatherToHost | str:
    """Return a function that gathers parameters, or a message if not all ranks can be reached."""
    if reachable is None:
        return "the run failed on some of its ranks only"
    group = reachable.group or dist.group.WORLD
    assert group is not None
    return GatherToHost(group, list(range(dist.get_world_size(group))), on_host=True)


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
