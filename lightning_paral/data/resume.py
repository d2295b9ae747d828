"""Where training is in its data: kept in a checkpoint, and found again at any world size."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lightning_paral.compat.lightning.loops import begin_training_data_anew, training_data_has_begun
from lightning_paral.data.global_order import Seed
from lightning_paral.data.iterable import ShardedIterable
from lightning_paral.data.sampler import RankBatchSampler

Source = RankBatchSampler | ShardedIterable


class DataPosition:
    """The position in the training loaders of a run.

    Args:
        trainer: counts the steps.
        seed: what all orders derive from; a checkpoint's replaces it.
    """

    def __init__(self, trainer: Trainer, seed: Seed) -> None:
        self.sources: list[Source] = []
        """What the training loaders draw from, in their order."""
        self._trainer = trainer
        self._seed = seed

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        fit_loop = self._trainer.fit_loop
        num_steps = processed(fit_loop.epoch_loop.batch_progress)
        begun: Any = fit_loop.epoch_progress.current
        return {
            "seed": self._seed.value,
            # The epoch that began last: after it `processed` is the next one, and after the fit so is `current_epoch`.
            "epoch": begun.started - 1,
            "loaders": [_position(source, num_steps) for source in self.sources],
        }

    def resume(self, state: dict[str, Any], restore_random: Callable[[], None]) -> bool:
        """Continue from `state`, at any world size. Called when training starts.

        Returns whether that is inside an epoch, whose earlier batches are not drawn again.

        Args:
            state: what `state` returned.
            restore_random: restores the global random generators to their states in the checkpoint.
        """

        def restore() -> None:
            restore_random()
            for source, position in zip(self.sources, state["loaders"], strict=False):
                _restore_generators(source, position)

        fit_loop = self._trainer.fit_loop
        if not training_data_has_begun(self._trainer):
            return False
        self._seed.value = state["seed"]
        epoch = processed(fit_loop.epoch_progress)
        num_steps = processed(fit_loop.epoch_loop.batch_progress)
        inside_epoch = state["epoch"] == epoch and num_steps > 0 and len(state["loaders"]) == len(self.sources)
        if self.sources:  # else the loaders are as the user made them, and so is where they begin
            if inside_epoch:
                self._move(state["loaders"], epoch, num_steps)
            else:
                restore()
            # The iterator was made before the position was known; workers may have begun to load from the start.
            begin_training_data_anew(self._trainer)
        if inside_epoch:
            # A new iterator draws a seed for its workers. The uninterrupted run did that when the epoch began.
            restore()
        return inside_epoch and bool(self.sources)

    def _move(self, positions: list[dict[str, Any]], epoch: int, num_steps: int) -> None:
        moved = [
            _resume(source, epoch, position, num_steps)
            for source, position in zip(self.sources, positions, strict=True)
        ]
        # Lightning has to believe that this world has come here by steps of its own, or the epoch would end elsewhere.
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        for counter in ("ready", "started", "processed", "completed"):
            setattr(progress, counter, getattr(progress, counter) + moved[0] - num_steps)


def processed(progress: Any) -> int:
    """Return how many epochs, or batches of the current epoch, are done. `progress` is that of Lightning's loops."""
    return int(progress.current.processed)


def _position(source: Source, num_steps: int) -> dict[str, Any]:
    if isinstance(source, RankBatchSampler):
        generators = [generator.get_state() for generator in source.order.generators()] if source.order.shared else []
        return source.position(num_steps) | ({"generators": generators} if generators else {})
    return {"repetition": 0, "samples": num_steps * source.turn_size}


def _restore_generators(source: Source, position: dict[str, Any]) -> None:
    """Let the generators that samplers hold go on where they were."""
    if isinstance(source, RankBatchSampler) and source.order.shared:
        for generator, state in zip(source.order.generators(), position.get("generators", ()), strict=False):
            generator.set_state(state)


def _resume(source: Source, epoch: int, position: dict[str, Any], num_steps: int) -> int:
    """Move `source` to `position`; return after how many of its steps that is."""
    if isinstance(source, RankBatchSampler):
        return source.resume(epoch, position, num_steps)
    source.resume(epoch, position["samples"])
    return int(position["samples"]) // source.turn_size
