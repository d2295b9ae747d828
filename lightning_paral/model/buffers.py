"""Keep buffers equal: every rank has them in full and updates them by its own samples; rank 0's are used."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.compat.torch.ddp_ignored import ignored_by_ddp
from lightning_paral.compat.torch.modules import own_buffers
from lightning_paral.distributed.mesh import ParallelDims


class RankZeroBuffers:
    """Broadcasts rank 0's buffers before they are used.

    As `torch.nn.parallel.DistributedDataParallel`, before the first micro-batch of each accumulation window; and at the
    start of evaluation, which then evaluates what is saved. Always broadcasts all buffers: a version counter does not
    show changes through `.data`, and ranks may change different buffers.

    The states of torchmetrics are no buffers of the module; each rank keeps its own.

    Args:
        module: its buffers are looked up each time, so they may be replaced.
        enabled: whether to broadcast at all. Nothing is broadcast if a single rank holds the buffers.
        dims: which ranks hold the same buffers: those of a pipeline stage, whose first rank broadcasts.
        in_training: whether `before_training_step` broadcasts; `False` if the engine does that itself.
    """

    def __init__(self, module: Module, enabled: bool, dims: ParallelDims, *, in_training: bool = True) -> None:
        self._module = module
        self._dims = dims
        self._enabled = enabled and dist.is_initialized() and len(dims.stage_ranks) > 1
        self._in_training = in_training
        self._due = True
        self._accumulating = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside the block, treat steps as micro-batches that others of the same accumulation window follow."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def before_training_step(self) -> None:
        """Broadcast the buffers if an accumulation window begins. *Collective* over the world then."""
        if self._due and self._in_training:
            self.share()
        self._due = not self._accumulating

    def share(self) -> None:
        """Broadcast rank 0's buffers, in place. *Collective* over the world."""
        _unshard_buffers(self._module)
        if self._enabled:
            broadcast(shared_buffers(self._module), self._dims.stage_group())

    def share_averages(self, averaged: Module) -> None:
        """Broadcast the first rank's averages of the buffers, in place. *Collective* over the ranks that hold them.

        Args:
            averaged: a module with an average for each buffer of this one, in the same order.
        """
        if self._enabled:
            shared = {id(buffer) for buffer in shared_buffers(self._module)}
            averages = zip(self._module.buffers(), averaged.buffers(), strict=True)
            broadcast([average for buffer, average in averages if id(buffer) in shared], self._dims.stage_group())


def _unshard_buffers(module: Module) -> None:
    """Unshard buffers that were assigned values of sharded parameters, such as averages of weights."""
    for part in module.modules():
        buffers = own_buffers(part)
        for name, buffer in buffers.items():
            if isinstance(buffer, DTensor):
                buffers[name] = buffer.full_tensor().detach()


def shared_buffers(module: Module) -> list[Tensor]:
    """Return the buffers of `module` to broadcast: all but those that it tells DDP to ignore."""
    ignored = ignored_by_ddp(module)
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]
