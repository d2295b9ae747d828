"""Make Lightning's evaluation loops count each sample once: skip padding batches and join uneven results."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_paral.compat.lightning.combined_loader import batch_of, items_of, mode_of
from lightning_paral.compat.lightning.evaluation import (
    EvaluationLoop,
    PredictionLoop,
    Step,
    call_at_end_of_loader,
    call_step_without_hooks,
    combined_loader_of,
    replace_evaluation_step,
    replace_predict_step,
    set_results,
)
from lightning_paral.data.logged_agreement import LoggedHistory
from lightning_paral.data.padding import MaybeUneven, PaddingBatch, rollback_side_effects
from lightning_paral.data.uneven_metrics import change_updates, keep_steps_local, metrics_of_run
from lightning_paral.data.uneven_results import UnevenResults
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError


class ExactEvaluationLoops:
    """Changes Lightning's evaluation and prediction loops for the duration of a run.

    Args:
        trainer: the Trainer whose validation, test and prediction loops are changed until `undo` is closed.
        dims: the parallel dimensions, which say which ranks evaluate different samples.
        run_padding: whether the step contains collectives and must run for padding batches. Otherwise they are skipped.
        undo: a stack to which functions that undo the changes are pushed.
        history: remembers which logged values this rank has reduced.
    """

    def __init__(
        self, trainer: Trainer, dims: ParallelDims, run_padding: bool, undo: ExitStack, history: LoggedHistory
    ) -> None:
        self._trainer = trainer
        self._dims = dims
        self._run_padding = run_padding
        self._history = history
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            self._change_evaluation(loop, undo)
        self._change_prediction(trainer.predict_loop, undo)

    def _change_evaluation(self, loop: EvaluationLoop, undo: ExitStack) -> None:
        results = UnevenResults(self._dims, self._history)
        set_results(loop, results)

        def skip_padding(evaluation_step: Step) -> Step:
            def step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
                combined = combined_loader_of(loop)
                unwrapped = unwrap_batch(batch, combined)
                batch, is_padding, results.rank_local = unwrapped.batch, unwrapped.is_padding, unwrapped.some_have_none
                # A step that draws its batches itself may do so a different number of times on each rank.
                results.rank_local |= dataloader_iter is not None
                if not results.rank_local:  # all ranks have a batch
                    self._begin_step(loop, batch_idx, dataloader_idx)
                results.shows_constants = unwrapped.shows_constants
                with self._changing_metrics(results, 1.0 if is_padding else unwrapped.weight):
                    if not is_padding:
                        evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
                        return
                    several = mode_of(combined) == "sequential" and loop.num_dataloaders > 1
                    # At the end of the loader Lightning reads what this rank logged in earlier steps, under this index.
                    results.dataloader_idx = dataloader_idx if several else None
                    if self._run_padding:
                        self._discard_padding_step(loop, results, batch, batch_idx)

            return step

        def join_results() -> None:
            results.rank_local = False
            self._history.begin_part(
                f"the hooks at the end of {'the test' if self._trainer.testing else 'the validation'}"
            )
            results.exchange(self._trainer.lightning_module)

        replace_evaluation_step(loop, skip_padding, undo)
        call_at_end_of_loader(loop, self._trainer, join_results, undo)

    def _begin_step(self, loop: EvaluationLoop, batch_idx: int, dataloader_idx: int) -> None:
        stage = "test" if self._trainer.testing else "validation"
        loader = f" of loader {dataloader_idx}" if loop.num_dataloaders > 1 else ""
        self._history.begin_evaluation_step(f"{stage} batch {batch_idx}{loader}")

    @contextmanager
    def _changing_metrics(self, results: UnevenResults, weight: float) -> Iterator[None]:
        """Weight what is logged by the number of this rank's samples, and let no metric wait for ranks without any."""
        if weight == 1.0 and not results.rank_local:
            yield
            return
        if results.found_metrics is None:
            results.found_metrics = metrics_of_run(self._trainer)
        with ExitStack() as undo:
            if results.rank_local:
                keep_steps_local(results.found_metrics, undo)
            if weight != 1.0:
                undo.callback(setattr, results, "weight", 1.0)
                results.weight = weight
                change_updates(results.found_metrics, weight, undo)
            yield

    def _change_prediction(self, loop: PredictionLoop, undo: ExitStack) -> None:
        found: list[Any] | None = None

        def skip_padding(predict_step: Step) -> Step:
            def step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
                nonlocal found
                unwrapped = unwrap_batch(batch, combined_loader_of(loop))
                with ExitStack() as undo_step:
                    if unwrapped.some_have_none or dataloader_iter is not None:
                        found = metrics_of_run(self._trainer) if found is None else found
                        keep_steps_local(found, undo_step)
                    if not unwrapped.is_padding:
                        predict_step(unwrapped.batch, batch_idx, dataloader_idx, dataloader_iter)
                    elif self._run_padding:
                        several = loop.num_dataloaders > 1
                        self._run_padding_step(
                            loop, "predict_step", unwrapped.batch, batch_idx, dataloader_idx if several else None
                        )

            return step

        replace_predict_step(loop, skip_padding, undo)

    def _discard_padding_step(self, loop: EvaluationLoop, results: UnevenResults, batch: Any, batch_idx: int) -> None:
        discarded = UnevenResults(self._dims, LoggedHistory())
        discarded.rank_local = True
        discarded.dataloader_idx = results.dataloader_idx
        set_results(loop, discarded)
        try:
            hook_name = "test_step" if self._trainer.testing else "validation_step"
            self._run_padding_step(loop, hook_name, batch, batch_idx, results.dataloader_idx)
        finally:
            set_results(loop, results)

    def _run_padding_step(
        self,
        loop: EvaluationLoop | PredictionLoop,
        hook_name: str,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int | None,
    ) -> None:
        """Run the step for a padding batch and roll back its side effects. *Collective* if the step is."""
        trainer = self._trainer
        if batch is None:
            raise ConfigurationError(
                f"Rank {trainer.global_rank} got no batch from a dataset that shards itself, so it cannot take part in "
                f"the collectives of {hook_name} on the other ranks. Give every rank some data, or let the strategy "
                "shard the dataset: shard_iterable=True."
            )
        with rollback_side_effects(trainer.lightning_module):
            call_step_without_hooks(trainer, loop, hook_name, batch, batch_idx, dataloader_idx)


@dataclass(frozen=True)
class UnwrappedBatch:
    """A user's batch, and what is known about the batches of the other ranks in the same step."""

    batch: Any
    is_padding: bool
    some_have_none: bool
    """Whether the batch of another rank may be padding."""
    weight: float = 1.0
    """As in `MaybeUneven`."""
    shows_constants: bool = False
    """As in `MaybeUneven`."""


def unwrap_batch(batch: Any, combined: CombinedLoader) -> UnwrappedBatch:
    """Return the user's batch and what its marks say.

    If several loaders are combined so that each step has a batch of each (`"min_size"`, `"max_size"`,
    `"max_size_cycle"`), evaluation ends as in one process: with the shortest loader for `"min_size"`, otherwise with
    the longest. Later steps are padding.
    """
    mode = mode_of(combined)
    if mode == "sequential":
        weight, shows_constants = _division_of([batch])
        return UnwrappedBatch(
            _unwrap_item(batch), isinstance(batch, PaddingBatch), _some_have_none(batch), weight, shows_constants
        )
    items = items_of(combined, batch)
    lengths = [sized_len(loader) or 0 for loader in combined.flattened]
    from_longest = [item for item, length in zip(items, lengths, strict=True) if length == max(lengths)]
    if mode == "min_size":
        is_padding = any(isinstance(item, PaddingBatch) for item in items)
    else:
        is_padding = all(isinstance(item, PaddingBatch) for item in from_longest)
    some_have_none = any(map(_some_have_none, items))  # equal on all ranks, so before padding becomes `None`
    if mode == "max_size" and not is_padding:
        items = [None if isinstance(item, PaddingBatch) else item for item in items]
    weight, shows_constants = _division_of(items)
    users = batch_of(combined, [_unwrap_item(item) for item in items])
    return UnwrappedBatch(users, is_padding, some_have_none, weight, shows_constants)


def _some_have_none(item: Any) -> bool:
    return isinstance(item, PaddingBatch) or (isinstance(item, MaybeUneven) and item.some_have_none)


def _division_of(items: list[Any]) -> tuple[float, bool]:
    """Return the weight and `shows_constants` of batches; 1.0 if they are divided differently."""
    marks = [(item.weight, item.shows_constants) if isinstance(item, MaybeUneven) else (1.0, False) for item in items]
    return marks[0] if len({weight for weight, _ in marks}) == 1 else (1.0, False)


def _unwrap_item(batch: Any) -> Any:
    return batch.batch if isinstance(batch, PaddingBatch | MaybeUneven) else batch
