"""Keep buffers equal on all ranks: each rank updates its copy from its own samples, and rank 0's copy is broadcast."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_paral.comm.coalescing import broadcast
from lightning_paral.compat.torch.modules import own_buffers
from lightning_paral.distributed.mesh import ParallelDims


class RankZeroBuffers:
    """Broadcasts rank 0's buffers before they are used.

    Like `torch.nn.parallel.DistributedDataParallel`, it broadcasts them before the first micro-batch of each
    accumulation window. It also broadcasts them at the start of evaluation, so that evaluation uses the buffers that a
    checkpoint saves. Each broadcast includes all buffers: version counters do not count writes through `.data`, and
    ranks may write to different buffers.

    The states of torchmetrics' metrics are not buffers of the module; each rank keeps its own.

    Args:
        module: the module that has the buffers. They are looked up for each broadcast, so they may be replaced.
        enabled: whether to broadcast. Nothing is broadcast if only one rank holds the buffers.
        dims: the ranks of the run. All ranks of a pipeline stage hold the same buffers; the first of them broadcasts.
        in_training: whether to broadcast in training steps; `False` if the engine does that itself.
    """

    def __init__(self, module: Module, enabled: bool, dims: ParallelDims, *, in_training: bool = True) -> None:
        self._module = module
        self._dims = dims
        self._enabled = enabled and dist.is_initialized() and len(dims.stage_ranks) > 1
        self.in_training = in_training
        """Whether `before_training_step` has to be called."""
        self._due = True
        self._accumulating = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside the block, treat each step as a micro-batch that is not the last of its accumulation window."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def before_training_step(self) -> None:
        """Broadcast the buffers if an accumulation window begins. If so, *collective* over the world."""
        if self._due:
            self.broadcast()
        self._due = not self._accumulating

    def broadcast(self) -> None:
        """Broadcast rank 0's buffers, in place. *Collective* over the world."""
        if next(self._module.buffers(), None) is None:
            return
        _unshard_buffers(self._module)
        if self._enabled:
            broadcast(list(self._module.buffers()), self._dims.stage_group())

    def broadcast_averages(self, averaged: Module) -> None:
        """Broadcast the first rank's averages of the buffers, in place. *Collective* over the ranks that hold them.

        Args:
            averaged: a module with the averages of the buffers, in the same order.
        """
        if self._enabled:
            broadcast(list(averaged.buffers()), self._dims.stage_group())


def _unshard_buffers(module: Module) -> None:
    """Unshard buffers to which sharded tensors, such as averages of weights, have been assigned."""
    for part in module.modules():
        buffers = own_buffers(part)
        for name, buffer in buffers.items():
            if isinstance(buffer, DTensor):
                buffers[name] = buffer.full_tensor().detach()
