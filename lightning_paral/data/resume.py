"""The position of training in its data, which is saved in checkpoints and restored at any world size."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.loops import restart_training_data, training_data_has_started
from lightning_paral.data.global_order import Seed
from lightning_paral.data.iterable import ShardedIterable
from lightning_paral.data.sampler import RankBatchSampler

Source = RankBatchSampler | ShardedIterable


class DataPosition:
    """The position in the training loaders of a run.

    Args:
        trainer: the Trainer, which counts the steps.
        seed: the seed of the orders of the run. `resume` replaces its value by that of the checkpoint.
    """

    def __init__(self, trainer: Trainer, seed: Seed) -> None:
        self.sources: list[Source] = []
        """The object that draws the batches of each training loader."""
        self._trainer = trainer
        self._seed = seed

    def state(self) -> dict[str, Any]:
        """Return the position for a checkpoint."""
        fit_loop = self._trainer.fit_loop
        num_steps = num_processed(fit_loop.epoch_loop.batch_progress)
        return {
            "seed": self._seed.value,
            # The epoch that started last. Lightning's counters do not tell: `processed` counts it at its end,
            # `completed` after its end hooks, and `started` omits one after resuming at the end of an epoch.
            "epoch": self.sources[0].epoch if self.sources else 0,
            "loaders": [_position(source, num_steps) for source in self.sources],
        }

    def resume(self, state: dict[str, Any], restore_rng: Callable[[], None]) -> bool:
        """Continue from a position that was saved at any world size. Call this when training starts.

        Args:
            state: the position that `DataPosition.state` returned.
            restore_rng: a function that restores the states of the global random generators from the checkpoint.

        Returns:
            Whether the position is inside an epoch and the loaders skip the earlier batches of the epoch.
        """

        def restore() -> None:
            restore_rng()
            for source, position in zip(self.sources, state["loaders"], strict=False):
                _restore_generators(source, position)

        fit_loop = self._trainer.fit_loop
        if not training_data_has_started(self._trainer):
            return False
        self._seed.value = state["seed"]
        epoch = num_processed(fit_loop.epoch_progress)
        num_steps = num_processed(fit_loop.epoch_loop.batch_progress)
        inside_epoch = state["epoch"] == epoch and num_steps > 0 and len(state["loaders"]) == len(self.sources)
        if self.sources:  # otherwise the user's own loaders decide where they start
            if inside_epoch:
                self._move(state["loaders"], epoch, num_steps)
            else:
                restore()
            # The current iterator starts at the first batch, and its workers may already have loaded some batches.
            restart_training_data(self._trainer)
        if inside_epoch:
            # The new iterator drew a seed for its workers. Undo this: the saved states already include that draw.
            restore()
        return inside_epoch and bool(self.sources)

    def _move(self, positions: list[dict[str, Any]], epoch: int, num_steps: int) -> None:
        moved = [
            _resume(source, epoch, position, num_steps)
            for source, position in zip(self.sources, positions, strict=True)
        ]
        # Rewrite the progress counters as if this world size had taken every step of the epoch; otherwise Lightning
        # would end the epoch at the wrong batch.
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        for counter in ("ready", "started", "processed", "completed"):
            setattr(progress, counter, getattr(progress, counter) + moved[0] - num_steps)


def num_processed(progress: Any) -> int:
    """Return the number of finished epochs, or of finished batches in the epoch, from the `progress` of a loop."""
    return int(progress.current.processed)


def _position(source: Source, num_steps: int) -> dict[str, Any]:
    if isinstance(source, RankBatchSampler):
        generators = [generator.get_state() for generator in source.order.generators()] if source.order.shared else []
        return source.position(num_steps) | ({"generators": generators} if generators else {})
    size, num_workers = source.global_batch_size, source.num_workers
    return {"repetition": 0, "samples": num_steps * size, "step_size": size, "num_workers": num_workers}


def _restore_generators(source: Source, position: dict[str, Any]) -> None:
    """Restore the generators that samplers own."""
    if isinstance(source, RankBatchSampler) and source.order.shared:
        for generator, state in zip(source.order.generators(), position.get("generators", ()), strict=False):
            generator.set_state(state)


def _resume(source: Source, epoch: int, position: dict[str, Any], num_steps: int) -> int:
    """Move `source` to `position`. Return the number of steps before it."""
    if isinstance(source, RankBatchSampler):
        return source.resume(epoch, position, num_steps)
    source.resume(epoch, position["samples"], position)
    return int(position["samples"]) // source.global_batch_size
