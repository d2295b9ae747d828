"""Gather full parameters in host memory at the end of a run, if ranks and memory permit it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_paral.compat.torch.collectives import all_gather_single
from lightning_paral.distributed.failures.reachable import ReachableRanks
from lightning_paral.distributed.mesh import shard_ranks
from lightning_paral.model.host_memory_check import host_memory_shortage


class GatherToHost:
    """Gathers the rows of sharded tensors into full tensors in host memory. *Collective* over `group`.

    Args:
        group: the ranks that call it: all ranks, or those that together hold one replica of the model.
        ranks: ranks of `group` that together hold one replica, in the order of their shards.
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
        """Return the full value of `tensor`, a DTensor sharded by rows, on CPU: the GPU may lack memory for it.

        If `tensor` is on the meta device, return a full meta tensor.
        """
        shape, local = tensor.shape, tensor.to_local()
        if local.is_meta:
            return torch.empty(shape, dtype=local.dtype, device="meta")
        num_rows, world_size = -(-shape[0] // len(self._ranks)), dist.get_world_size(self._group)
        full = torch.empty(shape, dtype=local.dtype)
        step = max(1, self.piece_bytes // max(1, world_size * shape[1:].numel() * local.element_size()))
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            own = local[start:stop].cpu() if self._on_host else local[start:stop]
            padded = own.new_zeros((stop - start, *shape[1:]))
            padded[: len(own)].copy_(own)
            pieces = own.new_empty((world_size, *padded.shape))
            # As bytes: gloo supports neither float8 nor int16.
            as_bytes = [tensor.view(-1).view(torch.uint8) for tensor in (pieces, padded)]
            all_gather_single(*as_bytes, group=self._group)
            on_host = pieces.cpu()
            for number, rank in enumerate(self._ranks):
                rows = full[number * num_rows + start : number * num_rows + stop]
                rows.copy_(on_host[rank, : len(rows)])
        return full


def gather_at_end(mesh: DeviceMesh, num_bytes: int, num_local_ranks: int) -> GatherToHost | str:
    """Return a function that gathers parameters, or a message if a node lacks memory for them. *Collective*.

    Args:
        mesh: the device mesh of the run; the model is sharded over its last dimension.
        num_bytes: the size of all parameters, unsharded, in bytes.
        num_local_ranks: the number of ranks per node. Each of them gathers all parameters.
    """
    shortage = host_memory_shortage(num_bytes, num_local_ranks)
    if shortage is not None:
        return shortage
    group = mesh.get_group(mesh.ndim - 1)
    return GatherToHost(group, list(range(dist.get_world_size(group))))


def gather_after_failure(mesh: DeviceMesh, reachable: ReachableRanks) -> GatherToHost | str:
    """Return a function that gathers parameters, or a message if only some of the ranks failed."""
    if not reachable.all_reachable:
        return "the run failed on some of its ranks only"
    group = reachable.group or dist.group.WORLD
    assert group is not None
    return GatherToHost(group, shard_ranks(mesh), on_host=True)
