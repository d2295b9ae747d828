"""Gather the predictions of all ranks in the order in which a single process returns them."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from lightning_paral.data.division import ShardSpec
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError


class GatherPredictions(Callback):
    """Makes `trainer.predict` return on every rank the predictions of a single process: each sample once, in order.

    Use it as `Trainer(callbacks=[GatherPredictions()])`. Every rank then holds all predictions, on CPU. With
    `split="global"`, the parts of each batch are joined, so predictions must be tensors or lists with one item per
    sample, or dicts or tuples of these.
    """

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the predictions on all ranks. *Collective* over the data ranks.

        Raises:
            ConfigurationError: the order of a loader is unknown, or parts of a batch cannot be joined.
        """
        loop = trainer.predict_loop
        # Other strategies have no `dims`. `_shard_of` refuses their loaders, whose order is unknown.
        dims = getattr(trainer.strategy, "dims", ParallelDims(replicate=trainer.world_size))
        if dims.data_size == 1 or not loop.return_predictions:
            return
        loaders = CombinedLoader(trainer.predict_dataloaders).flattened
        by_loader = [loop.predictions] if len(loaders) == 1 else loop.predictions
        for loader, predictions in zip(loaders, by_loader, strict=True):
            shard, padding_steps = _shard_of(loader)
            steps = (step for step in range(len(predictions) + len(padding_steps)) if step not in padding_steps)
            gathered = dims.data_rank_group().gather(dict(zip(steps, predictions, strict=False)))
            predictions[:] = _interleave_batches(gathered) if shard.split == "batch" else _join_parts(gathered)


def _shard_of(loader: Any) -> tuple[ShardSpec, set[int]]:
    sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    for source in (sampler, getattr(loader, "sampler", None), dataset):
        shard = getattr(source, "shard", None)
        if isinstance(shard, ShardSpec):
            return shard, {step for step, mark in source.marks.items() if mark.is_padding}  # type: ignore[union-attr]
    raise ConfigurationError(
        f"GatherPredictions does not know in which order the ranks drew from {type(loader).__name__}: the "
        "strategy did not distribute it. Pass a DataLoader without a distributed sampler, and leave "
        "use_distributed_sampler=True."
    )


def _interleave_batches(gathered: list[dict[int, Any]]) -> list[Any]:
    """Return the batches of all ranks, ordered by step and then by rank. `gathered[rank][step]` is a batch."""
    return [batches[step] for step in range(_num_steps(gathered)) for batches in gathered if step in batches]


def _num_steps(gathered: list[dict[int, Any]]) -> int:
    return max(max(batches, default=-1) for batches in gathered) + 1


def _join_parts(gathered: list[dict[int, Any]]) -> list[Any]:
    """Join the parts of each batch. Sample `s` of all samples is on data rank `s % data_size`."""
    batches: list[Any] = []
    num_samples, data_size = 0, len(gathered)
    for step in range(_num_steps(gathered)):
        order = [gathered[(num_samples + offset) % data_size] for offset in range(data_size)]
        parts = [batches_of_rank[step] for batches_of_rank in order if step in batches_of_rank]
        num_samples += sum(map(_num_samples, parts))
        batches.append(_interleave(parts))
    return batches


def _num_samples(part: Any) -> int:
    if isinstance(part, dict):
        return _num_samples(next(iter(part.values())))
    if isinstance(part, tuple):
        return _num_samples(part[0])
    if isinstance(part, list) or (isinstance(part, Tensor) and part.ndim):
        return len(part)
    raise ConfigurationError(
        f"GatherPredictions cannot join parts of type {type(part).__name__}. Let predict_step return tensors or lists "
        "with one item per sample, or dicts or tuples of them, or set split='batch'."
    )


def _interleave(parts: list[Any]) -> Any:
    """Join `n` parts of a batch: the first has samples 0, n, 2n, ..., the second samples 1, n + 1, ..., and so on."""
    if isinstance(parts[0], dict):
        return {key: _interleave([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(_interleave(list(items)) for items in zip(*parts, strict=True))
    size = sum(map(_num_samples, parts))
    joined: Any = torch.empty(size, *parts[0].shape[1:], dtype=parts[0].dtype) if _is_tensor(parts) else [None] * size
    for offset, part in enumerate(parts):
        joined[offset :: len(parts)] = part
    return joined


def _is_tensor(parts: list[Any]) -> bool:
    return isinstance(parts[0], Tensor)
