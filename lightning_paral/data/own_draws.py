"""Let each data rank draw its own random numbers for its own samples: in steps, and where datasets are read."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.distributed.rng_state import derive_seed, digest_of_torch_state, own_numbers, shared_numbers

_STEPS = "training_step", "validation_step", "test_step", "predict_step"
_TRANSFERS = "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"
_OF_ALL_RANKS = "optimizer_step", "save_checkpoint"  # which a step calls in manual optimization


class OwnDraws:
    """Seeds the global generators with numbers of this data rank, until the end of a step or of reading a batch.

    The seeds follow from the state of torch's generator, the number of the batch, and the data rank. They change
    nothing outside: all ranks continue with equal numbers in hooks and optimizers, and checkpoints need nothing else.

    Args:
        trainer: the Trainer.
        data_rank: the data rank.
        undo: what the end of the run closes.
        in_steps: whether steps draw numbers of the data rank, until `undo` is closed.
    """

    _trainer: Trainer | None = None
    """`None` in a copy, which belongs to no run."""

    def __init__(self, trainer: Trainer, data_rank: int, undo: ExitStack, *, in_steps: bool) -> None:
        self._trainer = trainer
        self._data_rank = data_rank
        self._place: object = None
        self._counts: Counter[str] = Counter()
        strategy = trainer.strategy
        users = [each for each in (trainer.lightning_module, vars(trainer).get("datamodule")) if each is not None]
        transfers = any(is_overridden(name, user) for name, user in product(_TRANSFERS, users))
        for name in (*_STEPS, *["batch_to_device"] * transfers) if in_steps else ():
            shadow_method(strategy, name, self._drawing(name)(getattr(strategy, name)), undo)
        for name in _OF_ALL_RANKS:
            shadow_method(strategy, name, shared_numbers()(getattr(strategy, name)), undo)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def _drawing(self, name: str) -> Iterator[None]:
        assert self._trainer is not None
        place = digest_of_torch_state(), self._trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if place != self._place:
            self._place, self._counts = place, Counter()
        self._counts[name] += 1
        with own_numbers(derive_seed(*place, name, self._counts[name], self._data_rank)):
            yield

    def reading(self, loader: str, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield `batches` of the loader of this name, which this process reads from the dataset itself."""
        while True:
            with nullcontext() if self._trainer is None else self._drawing(loader):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch
