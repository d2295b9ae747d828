"""Buffers, which every rank holds whole and changes by what it sees: those of rank 0 count."""

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
    """Gives all ranks rank 0's buffers when `torch.nn.parallel.DistributedDataParallel` does, and where it matters.

    That is before the first micro-batch of each accumulation window, and at the start of evaluation: what is evaluated
    is what is saved. All of them each time: whether a buffer has changed cannot be read from its version counter, which
    a change through `.data` leaves as it is, and may differ from rank to rank.

    torchmetrics' states are no buffers of the module: each rank keeps its own.

    Args:
        module: its buffers are looked up anew each time, so they may be replaced.
        enabled: whether to do anything; it never does where one rank is alone with its buffers.
        dims: which ranks hold the same buffers: those of a pipeline stage, whose first rank counts.
    """

    def __init__(self, module: Module, enabled: bool, dims: ParallelDims) -> None:
        self._module = module
        self._dims = dims
        self._enabled = enabled and dist.is_initialized() and len(dims.stage_ranks) > 1
        self._due = True
        self._accumulating = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Treat steps inside as micro-batches that others of the same window follow."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def before_training_step(self) -> None:
        """Share the buffers if a window begins. *Collective* over the world then."""
        if self._due:
            self.share()
        self._due = not self._accumulating

    def share(self) -> None:
        """Share the buffers. *Collective* over the world."""
        _gather_sharded(self._module)
        if self._enabled:
            broadcast(shared_buffers(self._module), self._dims.stage_group())


def _gather_sharded(module: Module) -> None:
    """Make buffers whole that were assigned values of sharded parameters, as averages of weights are."""
    for part in module.modules():
        buffers = own_buffers(part)
        for name, buffer in buffers.items():
            if isinstance(buffer, DTensor):
                buffers[name] = buffer.full_tensor().detach()


def shared_buffers(module: Module) -> list[Tensor]:
    """Return the buffers of `module`, except those that it tells DDP to ignore."""
    ignored = ignored_by_ddp(module)
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]
