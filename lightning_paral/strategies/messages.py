"""The line with which a fit starts, and the warnings of libraries that users can do nothing about."""

import math
import warnings
from contextlib import ExitStack, suppress
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_paral.checkpoint.shards import FlatShard
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.data.sampler import RankBatchSampler
from lightning_paral.text import format_bytes

Ignored = tuple[str, type[Warning], str]
"""Patterns of a warning: of its message, its category, and of the module to which it is attributed."""

_ALWAYS_IGNORED: tuple[Ignored, ...] = (
    # Lightning 2.6.6 with torch 2.13: once for each loader.
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning, r"(pytorch_)?lightning\b"),
    # DeepSpeed 0.19.8 with torch 2.13: when it is imported.
    (r"`torch\.jit\.script_method` is deprecated", DeprecationWarning, r"torch\.jit\b"),
)
# Lightning warns because its own loaders cannot resume inside an epoch. Ours can.
RESUMED_INSIDE_EPOCH: Ignored = "You're resuming from a checkpoint that ended before the epoch ended", UserWarning, ""


def ignore_warnings(undo: ExitStack, *ignored: Ignored) -> None:
    """Ignore warnings until `undo` is closed; without any given, those that no user can do anything about.

    Warning filters are global to the process. Changes that other code makes to them in the meantime are kept.
    """
    for message, category, module in ignored or _ALWAYS_IGNORED:
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", message, category, module)
        if warnings.filters[0] not in before:  # otherwise the user added the same filter, which has to be kept
            undo.callback(_remove, warnings.filters[0])


def _remove(added: Any) -> None:
    with suppress(ValueError):  # the filters may have been reset
        warnings.filters.remove(added)  # type: ignore[attr-defined]


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

    For example, `paral_fsdp: 4 ranks (4 shards) on 2 nodes, gloo, 32-true, split="batch", global batch size 64, 1.4 GiB
    of parameters per rank`.

    The parameters are those that a rank holds between steps. Gradients and optimizer states come on top of them.

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
    each = "rank" if dims.num_ranks > 1 else "device"
    parts.append(f"{format_bytes(_held_bytes(strategy))} of parameters per {each}")
    return f"{getattr(strategy, 'strategy_name', type(strategy).__name__)}: {', '.join(map(str, parts))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _held_bytes(strategy: Any) -> int:
    """Return how many bytes of parameters this rank holds between steps: its shards, or all."""
    held, state = 0, strategy._sharded_state
    for parameter in strategy.lightning_module.parameters():
        if is_lazy(parameter):
            continue  # its shape is known after the first batch
        if isinstance(parameter, DTensor):
            numel = parameter.to_local().numel()
        elif isinstance(parameter, FlatShard):  # on another stage of a pipeline
            numel = parameter.local_numel
        elif parameter.numel() == 0:  # partitioned by ZeRO
            numel = math.ceil(math.prod(state.full_shape(parameter)) / strategy.dims.shard)
        else:
            numel = parameter.numel()
        held += numel * parameter.element_size()
    return held


def _global_batch_size(loader: Any, data_size: int) -> int | None:
    """Return the number of samples that all ranks together draw for one micro-batch; `None` if it is unknown."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, RankBatchSampler):
        size = getattr(sampler.order.batches, "batch_size", None)
        data_size = 1 if sampler.shard.split == "global" else data_size
    else:
        size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    return size * data_size if isinstance(size, int) else None
