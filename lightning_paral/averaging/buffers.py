"""Averages of buffers: each rank averages its own, and all ranks evaluate those of rank 0, which are also saved."""

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
    """Give all ranks rank 0's averages of the buffers of `module`, except of those that DDP ignores.

    *Collective* over the world.
    """
    if dist.get_world_size() == 1:
        return
    shared = {id(buffer) for buffer in shared_buffers(module)}
    averages = zip(module.buffers(), averaged.buffers(), strict=True)
    broadcast([average for buffer, average in averages if id(buffer) in shared])


def broadcast_when_swapped() -> Callable[[], None]:
    """Make `WeightAveraging` share its averages of buffers whenever it swaps; return a function that ends this.

    For strategies under which a rank has whole weights, and averages them as Lightning does.
    """
    swap = swap_method()

    def swap_models(callback: Any, pl_module: LightningModule) -> None:
        broadcast_averaged_buffers(pl_module, averages_of(callback).module)
        swap(callback, pl_module)

    return replace_methods(WeightAveraging, {SWAP: swap_models})
