"""The line with which a fit starts."""

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.data.sampler import RankBatchSampler


def print_start_line(trainer: Trainer, strategy: Any) -> None:
    """Print the line on rank 0 as soon as the fit has its training loaders, before the first progress bar.

    Call this when a fit begins.
    """
    loop: Any = trainer.fit_loop

    def setup_data() -> None:
        vars(loop).pop("setup_data", None)
        loop.setup_data()
        if trainer.train_dataloader is not None:
            rank_zero_info(start_line(trainer, strategy, CombinedLoader(trainer.train_dataloader).flattened))

    vars(loop).pop("setup_data", None)  # left by a run that failed before it created loaders
    shadow_method(loop, "setup_data", setup_data)


def start_line(trainer: Trainer, strategy: Any, loaders: list[Any]) -> str:
    """Return the line.

    For example, `paral_fsdp: 4 ranks (4 shards) on 2 nodes, gloo, 32-true, split="batch", global batch size 64`.

    Args:
        trainer: the Trainer of the run.
        strategy: a strategy of this package, after its process group was created.
        loaders: the training loaders of this rank. If a batch size is unknown, the line has no batch size.
    """
    device, dims = strategy.root_device.type, strategy.dims
    if dist.is_initialized() and dims.num_ranks > 1:
        ranks = f"{_count(dims.num_ranks, 'rank')} ({dims}) on {_count(trainer.num_nodes, 'node')}"
        backend = str(dist.get_backend())
    else:
        ranks, backend = _count(len(strategy.parallel_devices or [strategy.root_device]), "device"), device
    parts = [ranks, backend, strategy.precision_plugin.precision]
    if dims.data_size > 1:
        parts.append(f'split="{strategy.sampling.split}"')
    sizes = [_global_batch_size(loader, dims.data_size) for loader in loaders]
    if sizes and None not in sizes:
        accumulated = trainer.accumulate_grad_batches
        parts.append(f"global batch size {' and '.join(map(str, sizes))}")
        parts += [f"{accumulated} batches accumulated"] * (accumulated > 1)
    return f"{getattr(strategy, 'strategy_name', type(strategy).__name__)}: {', '.join(map(str, parts))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _global_batch_size(loader: Any, data_size: int) -> int | None:
    """Return the number of samples that all ranks together draw for one micro-batch; `None` if it is unknown."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, RankBatchSampler):
        size = getattr(sampler.order.batches, "batch_size", None)
        data_size = 1 if sampler.shard.split == "global" else data_size
    else:
        size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    return size * data_size if isinstance(size, int) else None
