"""Gather the predictions of all ranks in the order in which one process returns them."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from lightning_paral.data.iterable import ShardedIterable
from lightning_paral.data.sampler import ShardSpec
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError


class GatherPredictions(Callback):
    """Makes `trainer.predict` return on every rank what one process returns: each sample once, in the same order.

    `Trainer(callbacks=[GatherPredictions()])`. Every rank then holds all predictions, on CPU. `split="global"` joins
    the parts of each batch: predictions must then be tensors or lists with one item per sample, or dicts or tuples of
    them.
    """

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the predictions on all ranks. *Collective* over the data ranks.

        Raises:
            ConfigurationError: the order of a loader is unknown, or parts of a batch cannot be joined.
        """
        loop = trainer.predict_loop
        # Strategies of others are refused below: what their ranks draw is unknown.
        dims = getattr(trainer.strategy, "dims", ParallelDims(replicate=trainer.world_size))
        if dims.data_size == 1 or not loop.return_predictions:
            return
        loaders = CombinedLoader(trainer.predict_dataloaders).flattened
        of_loaders = [loop.predictions] if len(loaders) == 1 else loop.predictions
        for loader, predictions in zip(loaders, of_loaders, strict=True):
            shard, padding_steps = _shard_of(loader)
            steps = (step for step in range(len(predictions) + len(padding_steps)) if step not in padding_steps)
            gathered = dims.data_rank_group().gather(dict(zip(steps, predictions, strict=False)))
            predictions[:] = _in_turn(gathered) if shard.split == "batch" else _joined(gathered)


def _shard_of(loader: Any) -> tuple[ShardSpec, set[int]]:
    sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    for source in (sampler, getattr(loader, "sampler", None), dataset):
        shard = getattr(source, "shard", None)
        if isinstance(shard, ShardSpec):
            return shard, set() if isinstance(source, ShardedIterable) else source.padding_steps  # type: ignore[union-attr]
    raise ConfigurationError(
        f"GatherPredictions does not know in which order the ranks drew from {type(loader).__name__}: the "
        "strategy did not distribute it. Give a DataLoader without a distributed sampler, and leave "
        "use_distributed_sampler=True."
    )


def _in_turn(gathered: list[dict[int, Any]]) -> list[Any]:
    """Return the batches of all ranks, rank by rank in each step."""
    num_steps = max(max(of_rank, default=-1) for of_rank in gathered) + 1
    return [of_rank[step] for step in range(num_steps) for of_rank in gathered if step in of_rank]


def _joined(gathered: list[dict[int, Any]]) -> list[Any]:
    """Join the parts of each batch. Sample number `s` of all samples is on data rank `s % data_size`."""
    batches: list[Any] = []
    num_samples, data_size = 0, len(gathered)
    for step in range(max(max(of_rank, default=-1) for of_rank in gathered) + 1):
        order = [gathered[(num_samples + offset) % data_size] for offset in range(data_size)]
        parts = [of_rank[step] for of_rank in order if step in of_rank]
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
    """Join `n` parts of a batch: the first holds samples 0, n, 2n, ..., the second 1, n + 1, ..., and so on."""
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
