"""Averages of buffers, which ranks compute from buffers of their own: those of rank 0 are evaluated, as saved."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging
from torch.nn import Module

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.compat.methods import replace_methods
from lightning_paral.model.buffers import shared_buffers


def share_averaged_buffers(module: Module, averaged: Module) -> None:
    """Give all ranks rank 0's averages of the buffers of `module`, but of those DDP leaves alone.

    *Collective* over the world.
    """
    if dist.get_world_size() == 1:
        return
    shared = {id(buffer) for buffer in shared_buffers(module)}
    averages = zip(module.buffers(), averaged.buffers(), strict=True)
    broadcast([average for buffer, average in averages if id(buffer) in shared])


def share_when_swapped() -> Callable[[], None]:
    """Let `WeightAveraging` share averages of buffers when they are swapped in; return what ends that.

    For strategies under which a rank has whole weights, and averages them as Lightning does.
    """
    swap = WeightAveraging._swap_models

    def swap_models(callback: Any, pl_module: LightningModule) -> None:
        share_averaged_buffers(pl_module, callback._average_model.module)
        swap(callback, pl_module)

    return replace_methods(WeightAveraging, {"_swap_models": swap_models})
