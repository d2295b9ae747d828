"""Gather full parameters in host memory at the end of a run, if ranks and memory permit it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.checkpoint.dtensor_chunks import chunks_by_rank
from lightning_paral.checkpoint.layout import chunks_of_flat_range
from lightning_paral.checkpoint.shards import flat
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
