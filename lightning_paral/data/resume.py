"""The position of training in its data, which is saved in checkpoints and restored at any world size."""

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_paral.compat.lightning.loops import restart_training_data, training_data_has_started
from lightning_paral.data.iterable import ShardedIterable, is_stateful
from lightning_paral.data.loaders import with_iteration
from lightning_paral.data.sampler import RankBatchSampler, Seed
from lightning_paral.distributed.exchange import all_ranks

Source = RankBatchSampler | ShardedIterable
_NUM_STATES = 4  # of the last steps, of which a save leaves out those that were read but not trained on


class DataPosition:
    """The position in the training loaders of a run.

    A loader that the strategy divides is resumed by the position of its source. A loader that it does not divide, and
    that saves its own state, is resumed by that: each rank by its own.

    Args:
        trainer: the Trainer, which counts the steps.
        seed: the seed of the orders of the run. `resume` replaces its value by that of the checkpoint.
    """

    def __init__(self, trainer: Trainer, seed: Seed) -> None:
        self.sources: list[Source] = []
        """The object that draws the batches of each training loader that is divided."""
        self._trainer = trainer
        self._seed = seed

    def state(self, *, with_all_ranks: bool = True) -> dict[str, Any]:
        """Return the position for a checkpoint. *Collective* over the world if loaders have states of their own.

        Args:
            with_all_ranks: whether all ranks call this. Otherwise loaders' own states are those of this rank.
        """
        fit_loop = self._trainer.fit_loop
        num_steps = num_processed(fit_loop.epoch_loop.batch_progress)
        is_last = fit_loop.epoch_loop.batch_progress.is_last_batch
        epochs: Any = fit_loop.epoch_progress.current
        own = [_own_state(loader, None if is_last else num_steps) for loader in self._stateful_loaders()]
        return {
            "seed": self._seed.value,
            # The epoch that started last. Lightning's counters do not tell: `processed` counts it at its end,
            # `completed` after its end hooks, and `started` omits one after resuming at the end of an epoch.
            "epoch": self.sources[0].epoch if self.sources else 0,
            "loaders": [source.position(num_steps) for source in self.sources],
            "is_counted": epochs.processed >= epochs.started,
            "own_states": (all_ranks().gather(own) if with_all_ranks else [own]) if own else [],
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
                if isinstance(source, RankBatchSampler):
                    source.restore_generators(position)

        fit_loop = self._trainer.fit_loop
        if not training_data_has_started(self._trainer):
            return False
        self._seed.value = state["seed"]
        epoch = num_processed(fit_loop.epoch_progress)
        num_steps = num_processed(fit_loop.epoch_loop.batch_progress)
        inside_epoch = state["epoch"] == epoch and num_steps > 0 and len(state["loaders"]) == len(self.sources)
        is_last = fit_loop.epoch_loop.batch_progress.is_last_batch
        has_loaded = self._load_own_states(state.get("own_states", []), 0 if is_last else num_steps)
        streams = [each for each in self.sources if isinstance(each, ShardedIterable) and each.keeps_states]
        for stream in streams:
            stream.start_over()
        if self.sources:  # otherwise the user's own loaders decide where they start
            if inside_epoch:
                self._move(state["loaders"], epoch, num_steps)
            else:
                for source in self.sources:  # what was read ahead may have been of the first epoch
                    source.set_epoch(epoch)
                restore()
        # At the end of an epoch, reading what has a state of its own ahead would lose batches of the next one.
        is_at_end = is_last and num_steps > 0 and not state.get("is_counted", True) and (has_loaded or bool(streams))
        if (self.sources or has_loaded) and not is_at_end:
            # The current iterator starts at the first batch, and its workers may already have loaded some batches.
            restart_training_data(self._trainer)
        if inside_epoch:
            # The new iterator drew a seed for its workers. Undo this: the saved states already include that draw.
            restore()
        return inside_epoch and bool(self.sources)

    def _move(self, positions: list[dict[str, Any]], epoch: int, num_steps: int) -> None:
        moved = [
            source.resume(epoch, position, num_steps) for source, position in zip(self.sources, positions, strict=True)
        ]
        # Rewrite the progress counters as if this world size had taken every step of the epoch; otherwise Lightning
        # would end the epoch at the wrong batch.
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        for counter in ("ready", "started", "processed", "completed"):
            setattr(progress, counter, getattr(progress, counter) + moved[0] - num_steps)

    def _stateful_loaders(self) -> list[Any]:
        """Return the training loaders that are not divided and save their own state; see `keep_states`."""
        loaders = self._trainer.train_dataloader
        found = [] if loaders is None else CombinedLoader(loaders).flattened
        return [
            each
            for each in found
            if is_stateful(each) and (hasattr(each, "paral_states") or not isinstance(each, DataLoader))
        ]

    def _load_own_states(self, by_rank: list[list[Any]], num_steps: int) -> bool:
        """Load the loaders' own states of this rank. Return whether there are any."""
        ranks, loaders, num_saved = all_ranks(), self._stateful_loaders(), len(by_rank[0]) if by_rank else 0
        if num_saved != len(loaders):
            rank_zero_warn(
                f"The checkpoint has the own states of {num_saved} training loaders, but here {len(loaders)} of them "
                "save their own. They start with their first batch."
            )
        if not loaders or num_saved != len(loaders):
            return False
        if len(by_rank) != ranks.world_size:
            rank_zero_warn(
                f"The checkpoint has the states of the training loaders of {len(by_rank)} ranks, but this run has "
                f"{ranks.world_size}: all ranks load that of rank 0. Whether {type(loaders[0]).__name__} then "
                "continues with the samples that are left depends on its library. Resume at the same number of ranks, "
                "or from a checkpoint saved at the end of an epoch."
            )
        states = by_rank[ranks.rank if len(by_rank) == ranks.world_size else 0]
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)
            vars(loader).get("paral_states", _States()).num_steps = num_steps
        return True


class _States(dict[int, Any]):
    """The states of a loader after the last steps of the epoch, by the number of steps before them."""

    num_steps = 0
    """The number of steps before the next iteration."""


def keep_states(loader: object) -> object:
    """Return a copy of a training loader with a state of its own, of which the states after the last steps are kept.

    Lightning reads a batch before the previous one was trained on, if the loader has no length, and so before a save.
    Any other loader is returned as it is.
    """
    if not isinstance(loader, DataLoader) or not is_stateful(loader):
        return loader
    states = _States()

    def iterate(batches: Iterator[Any]) -> Iterator[Any]:
        num_steps, states.num_steps = states.num_steps, 0
        states.clear()
        for batch in batches:
            num_steps += 1
            states[num_steps] = changed.state_dict()
            states.pop(num_steps - _NUM_STATES, None)
            yield batch

    changed: Any = with_iteration(loader, iterate)
    vars(changed)["paral_states"] = states
    return changed


def _own_state(loader: Any, num_steps: int | None) -> Any:
    """Return the state of `loader` after `num_steps` steps of the epoch; the current one at the end of an epoch."""
    states = getattr(loader, "paral_states", {})
    return states[num_steps] if num_steps in states else loader.state_dict()


def num_processed(progress: Any) -> int:
    """Return the number of finished epochs, or of finished batches in the epoch, from the `progress` of a loop."""
    return int(progress.current.processed)
