"""Averages of buffers: each rank averages its own; rank 0's are saved and evaluated on all ranks."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from torch.nn import Module

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.compat.lightning.averaging import SWAP, averages_of, swap_method
from lightning_paral.compat.lightning.methods import replace_methods
from lightning_paral.model.buffers import shared_buffers


def broadcast_averaged_buffers(module: Module, averaged: Module) -> None:
    """Broadcast rank 0's averages of the buffers of `module`, except of those that DDP ignores. *Collective*."""
    if dist.get_world_size() == 1:
        return
    shared = {id(buffer) for buffer in shared_buffers(module)}
    averages = zip(module.buffers(), averaged.buffers(), strict=True)
    broadcast([average for buffer, average in averages if id(buffer) in shared])


def broadcast_when_swapped() -> Callable[[], None]:
    """Make `WeightAveraging` broadcast its averages of buffers at each swap; return a function that undoes this.

    For strategies whose ranks hold full weights, which Lightning averages itself.
    """
    swap = swap_method()

    def swap_models(callback: Any, pl_module: LightningModule) -> None:
        broadcast_averaged_buffers(pl_module, averages_of(callback).module)
        swap(callback, pl_module)

    return replace_methods(WeightAveraging, {SWAP: swap_models})
