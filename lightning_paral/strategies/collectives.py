"""The collectives that Lightning, metrics and hooks call. After an exception they wait for no rank that may never join.

After an exception they return the value of this rank, unless all ranks raised an error after the same step.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.reduce_scatter import gather_rows
from lightning_paral.distributed.exchange import any_rank, every_rank
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.strategies.run_watch import RunWatch


class Collectives:
    """The part of a strategy that barriers, broadcasts, reduces and gathers.

    Args:
        strategy: the strategy, for all of its runs. Its `dims` say over which ranks a mean is taken.
        watch: knows which ranks can be reached.
    """

    def __init__(self, strategy: Any, watch: RunWatch) -> None:
        self._strategy, self._watch = strategy, watch
        self._logged_group: dist.ProcessGroup | None = None
        """During a run with several data ranks, the gloo group that reduces values on the CPU, if there is one."""

    def begin(self) -> None:
        """Create the group that reduces logged values. *Collective* over the world."""
        # In the group of the gradients, gloo would end the process if one rank reduces a value while another one
        # reduces a gradient.
        dims, timeout = self._strategy.dims, self._watch.timeout
        self._logged_group = None if dims.data_size == 1 else dims.group_for_only("logged values", timeout)

    def end(self) -> None:
        """Forget the group."""
        self._logged_group = None

    def barrier(self) -> None:
        """Wait for all ranks. *Collective*."""
        reachable, device = self._watch.reachable(), self._strategy.root_device
        if reachable is not None:
            on_cuda = device.type == "cuda" and reachable.group is None
            dist.barrier(group=reachable.group, device_ids=[device.index] if on_cuda else None)

    def broadcast(self, obj: Any, src: int) -> Any:
        """Return the `obj` of rank `src`. *Collective*."""
        reachable = self._watch.reachable()
        objects = [obj]
        if reachable is not None:
            dist.broadcast_object_list(objects, src, group=reachable.group)
        return objects[0]

    def reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce `tensor` in place, and return it; for the mean of integers, a new tensor. *Collective*."""
        ranks = self._watch.reachable() if isinstance(tensor, Tensor) else None
        if ranks is None or ranks.group is not None:  # after a failure
            return tensor
        average = reduce_op in (None, "mean", "avg", dist.ReduceOp.AVG)
        if average:
            operation = dist.ReduceOp.SUM  # gloo has no AVG
        else:
            operation = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
        num_ranks = self._strategy.dims.data_size if group is None else dist.get_world_size(group)
        dist.all_reduce(tensor, op=operation, group=self._group_for(tensor) if group is None else group)
        if average:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return tensor / num_ranks
            tensor.div_(num_ranks)
        return tensor

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        """Return the group of the data ranks that reduces `tensor`; `None` means the default group."""
        dims: ParallelDims = self._strategy.dims
        if self._logged_group is not None and tensor.device.type == "cpu":
            return self._logged_group
        return dims.data_group()

    def all_gather(self, tensor: Tensor, group: Any, sync_grads: bool) -> Tensor | None:
        """Return the tensors of the data ranks, stacked; `None` if Lightning's method gathers them. *Collective*."""
        is_default = dist.is_initialized() and group in (None, dist.group.WORLD)
        data_group = self._strategy.dims.data_group() if is_default else None
        if data_group is None:
            return None
        # torch's own function confuses ranks of a group with global ranks in its backward pass on gloo (torch 2.13).
        return gather_rows((tensor if sync_grads else tensor.detach()).unsqueeze(0), data_group)

    def decide(self, decision: bool, of_all: bool) -> bool:
        """Return whether `decision` is true on all ranks or, without `of_all`, on any. *Collective*."""
        reachable = self._watch.reachable()
        if reachable is None:
            return decision
        group = reachable.group
        if group is None and self._strategy.dims.data_size == self._strategy.dims.num_ranks:
            group = self._logged_group
        return every_rank(decision, group) if of_all else any_rank(decision, group)
