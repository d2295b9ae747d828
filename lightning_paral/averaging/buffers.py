"""Averages of buffers: each rank averages its own, and rank 0's averages are saved and evaluated."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import WeightAveraging

from lightning_paral.compat.lightning.callbacks import SWAP, averages_of, swap_method
from lightning_paral.compat.lightning.methods import replace_methods
from lightning_paral.model.buffers import RankZeroBuffers


def broadcast_when_swapped(buffers: RankZeroBuffers) -> Callable[[], None]:
    """Make `WeightAveraging` broadcast its averages of `buffers` at each swap; return a function that undoes this.

    For strategies whose ranks hold full weights, which Lightning averages itself.
    """
    swap = swap_method()

    def swap_models(callback: Any, pl_module: LightningModule) -> None:
        buffers.broadcast_averages(averages_of(callback).module)
        swap(callback, pl_module)

    return replace_methods(WeightAveraging, {SWAP: swap_models})
