"""Make Lightning's evaluation loops count each sample once: skip padding batches and join uneven results."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_paral.compat.lightning.evaluation import (
    EvaluationLoop,
    PredictionLoop,
    Step,
    batch_of,
    call_at_end_of_loader,
    call_step_without_hooks,
    combined_loader_of,
    items_of,
    mode_of,
    replace_evaluation_step,
    replace_predict_step,
    set_results,
)
from lightning_paral.data.division import Mark, Marked
from lightning_paral.data.logged_keys import LoggedHistory
from lightning_paral.data.metrics import change_updates, keep_steps_local, metrics_of_run
from lightning_paral.data.results import EVEN, SharedResults
from lightning_paral.data.rollback import rollback_side_effects
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
        self._metrics: list[Any] | None = None  # found in the module and the callbacks, until the end of the loader
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            self._change_evaluation(loop, undo)
        self._change_prediction(trainer.predict_loop, undo)

    def _change_evaluation(self, loop: EvaluationLoop, undo: ExitStack) -> None:
        results = SharedResults(self._dims, self._history, training=False)
        set_results(loop, results)

        def skip_padding(evaluation_step: Step) -> Step:
            def step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
                combined = combined_loader_of(loop)
                batch, mark = take_off_marks(batch, combined)
                # A step that draws its batches itself may do so a different number of times on each rank.
                results.rank_local = mark.some_have_none or dataloader_iter is not None
                results.mark = EVEN if mark.is_padding else mark
                stage = "test" if self._trainer.testing else "validation"
                loader = f" of loader {dataloader_idx}" if loop.num_dataloaders > 1 else ""
                self._history.where = f"{stage} batch {batch_idx}{loader}"
                with self._changing_metrics(results.mark.weight, is_local=results.rank_local):
                    if not mark.is_padding:
                        evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
                        return
                    several = mode_of(combined) == "sequential" and loop.num_dataloaders > 1
                    # At the end of the loader Lightning reads what this rank logged in earlier steps, under this index.
                    results.dataloader_idx = dataloader_idx if several else None
                    if self._run_padding:
                        self._discard_padding_step(loop, results, batch, batch_idx)

            return step

        def join_results() -> None:
            results.rank_local, results.mark, self._metrics = False, EVEN, None
            stage = "test" if self._trainer.testing else "validation"
            self._history.where = f"the hooks at the end of the {stage}"
            results.join(self._trainer.lightning_module)

        replace_evaluation_step(loop, skip_padding, undo)
        call_at_end_of_loader(loop, self._trainer, join_results, undo)

    def _change_prediction(self, loop: PredictionLoop, undo: ExitStack) -> None:
        def skip_padding(predict_step: Step) -> Step:
            def step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
                batch, mark = take_off_marks(batch, combined_loader_of(loop))
                with self._changing_metrics(1.0, is_local=mark.some_have_none or dataloader_iter is not None):
                    if not mark.is_padding:
                        predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
                    elif self._run_padding:
                        index = dataloader_idx if loop.num_dataloaders > 1 else None
                        self._run_padding_step(loop, "predict_step", batch, batch_idx, index)

            return step

        replace_predict_step(loop, skip_padding, undo)

    @contextmanager
    def _changing_metrics(self, weight: float, *, is_local: bool) -> Iterator[None]:
        """Weight metrics by the number of this rank's samples, and let none of them wait for ranks without any."""
        if weight == 1.0 and not is_local:
            yield
            return
        if self._metrics is None:
            self._metrics = metrics_of_run(self._trainer)
        with ExitStack() as undo:
            if is_local:
                keep_steps_local(self._metrics, undo)
            if weight != 1.0:
                change_updates(self._metrics, weight, undo)
            yield

    def _discard_padding_step(self, loop: EvaluationLoop, results: SharedResults, batch: Any, batch_idx: int) -> None:
        discarded = SharedResults(self._dims, LoggedHistory(), training=False)
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


def take_off_marks(batch: Any, combined: CombinedLoader) -> tuple[Any, Mark]:
    """Return the user's batch, and how the step is divided.

    If several loaders are combined so that each step has a batch of each (`"min_size"`, `"max_size"`,
    `"max_size_cycle"`), evaluation ends as in one process: with the shortest loader for `"min_size"`, otherwise with
    the longest. Later steps are padding.
    """
    mode = mode_of(combined)
    if mode == "sequential":
        return (batch.batch, batch.mark) if isinstance(batch, Marked) else (batch, EVEN)
    items = items_of(combined, batch)
    marks = [item.mark if isinstance(item, Marked) else EVEN for item in items]
    lengths = [sized_len(loader) or 0 for loader in combined.flattened]
    from_longest = [mark for mark, length in zip(marks, lengths, strict=True) if length == max(lengths)]
    ends = (
        any(mark.is_padding for mark in marks) if mode == "min_size" else all(mark.is_padding for mark in from_longest)
    )
    # Only weights that all loaders share say how the step is divided.
    weight, exceeds_ranks = (
        (marks[0].weight, marks[0].exceeds_ranks) if len({mark.weight for mark in marks}) == 1 else (1.0, False)
    )
    combined_mark = Mark(
        weight=0.0 if ends else weight or 1.0,
        some_have_none=any(mark.some_have_none for mark in marks),  # equal on all ranks
        exceeds_ranks=exceeds_ranks,
    )
    drops = mode == "max_size" and not ends
    users = [
        None if drops and mark.is_padding else item.batch if isinstance(item, Marked) else item
        for item, mark in zip(items, marks, strict=True)
    ]
    return batch_of(combined, users), combined_mark
