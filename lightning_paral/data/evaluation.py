"""Make Lightning's evaluation loops count each sample once, and gather predictions in the order of one process."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
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
    replace_step,
    set_results,
)
from lightning_paral.data.loaders import Marked
from lightning_paral.data.metrics import change_updates, keep_steps_local, metrics_of_run
from lightning_paral.data.results import LoggedHistory, SharedResults
from lightning_paral.data.rollback import rollback_side_effects
from lightning_paral.data.sampler import EVEN, Mark, ShardSpec
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.errors import ConfigurationError

_Loop = EvaluationLoop | PredictionLoop


class ExactEvaluationLoops:
    """Changes Lightning's evaluation and prediction loops for the duration of a run.

    Args:
        trainer: the Trainer whose validation, test and prediction loops are changed until `undo` is closed.
        history: remembers which logged values this rank has reduced.
        undo: a stack to which functions that undo the changes are pushed.
        run_padding: whether the step contains collectives and must run for padding batches. Otherwise they are skipped.
    """

    def __init__(self, trainer: Trainer, history: LoggedHistory, undo: ExitStack, *, run_padding: bool) -> None:
        self._trainer = trainer
        self._history = history
        self._run_padding = run_padding
        self._metrics: list[Any] | None = None  # found in the module and the callbacks, until the end of the loader
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            results = SharedResults(history, training=False)
            set_results(loop, results)
            replace_step(loop, partial(self._step, loop, results), undo)
            call_at_end_of_loader(loop, trainer, partial(self._join, results), undo)
        replace_step(trainer.predict_loop, partial(self._step, trainer.predict_loop, None), undo)

    def _step(self, loop: _Loop, results: SharedResults | None, step: Step, batch: Any, *place: Any) -> None:
        """Run `step`, the loop's own step, unless the batch is padding. `place` is what else Lightning passes to it."""
        combined, (batch_idx, dataloader_idx, _) = combined_loader_of(loop), place
        batch, mark = take_off_marks(batch, combined)
        weight = 1.0 if mark.is_padding or results is None else mark.weight
        if results is not None:
            results.rank_local, results.mark = mark.some_have_none, EVEN if mark.is_padding else mark
            loader = f" of loader {dataloader_idx}" if loop.num_dataloaders > 1 else ""
            self._history.where = f"{self._stage} batch {batch_idx}{loader}"
        with ExitStack() as undo:
            self._change_metrics(weight, is_local=mark.some_have_none, undo=undo)
            if not mark.is_padding:
                step(batch, *place)
                return
            index = dataloader_idx if mode_of(combined) == "sequential" and loop.num_dataloaders > 1 else None
            if results is not None:
                # At the end of the loader Lightning reads what this rank logged in earlier steps, under this index.
                results.dataloader_idx = index
            if self._run_padding:
                self._run_padding_step(loop, results, batch, batch_idx, index)

    @property
    def _stage(self) -> str:
        return "test" if self._trainer.testing else "validation"

    def _join(self, results: SharedResults) -> None:
        results.rank_local, results.mark, self._metrics = False, EVEN, None
        self._history.where = f"the hooks at the end of the {self._stage}"
        results.join(self._trainer.lightning_module)

    def _change_metrics(self, weight: float, *, is_local: bool, undo: ExitStack) -> None:
        """Weight metrics by the number of this rank's samples, and let none of them wait for ranks without any."""
        if self._metrics is None and (is_local or weight != 1.0):
            self._metrics = metrics_of_run(self._trainer)
        if is_local:
            keep_steps_local(self._metrics or (), undo)
        if weight != 1.0:
            change_updates(self._metrics or (), weight, undo)

    def _run_padding_step(
        self, loop: _Loop, results: SharedResults | None, batch: Any, batch_idx: int, dataloader_idx: int | None
    ) -> None:
        """Run the step for a padding batch, and discard what it logs and changes. *Collective* if the step is."""
        trainer, hook_name = self._trainer, "predict_step" if results is None else f"{self._stage}_step"
        if batch is None:
            raise ConfigurationError(
                f"This rank got no batch from a dataset that shards itself, and cannot join the {hook_name} of others. "
                "Give every rank some data, or let the strategy shard the dataset: shard_iterable=True."
            )
        with ExitStack() as undo:
            if results is not None and not isinstance(loop, PredictionLoop):
                discarded = SharedResults(LoggedHistory(self._history.dims), training=False)
                discarded.rank_local, discarded.dataloader_idx = True, dataloader_idx
                set_results(loop, discarded)
                undo.callback(set_results, loop, results)
            undo.enter_context(rollback_side_effects(trainer.lightning_module))
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
    padded, lengths = [mark.is_padding for mark in marks], [sized_len(loader) or 0 for loader in combined.flattened]
    in_longest = [each for each, length in zip(padded, lengths, strict=True) if length == max(lengths)]
    ends = any(padded) if mode == "min_size" else all(in_longest)
    # Only weights that all loaders share say how the step is divided.
    shared = marks[0] if len({mark.weight for mark in marks}) == 1 else EVEN
    combined_mark = Mark(
        weight=0.0 if ends else shared.weight or 1.0,
        some_have_none=any(mark.some_have_none for mark in marks),  # equal on all ranks
        exceeds_ranks=shared.exceeds_ranks,
    )
    drops = mode == "max_size" and not ends
    users = [
        None if drops and mark.is_padding else item.batch if isinstance(item, Marked) else item
        for item, mark in zip(items, marks, strict=True)
    ]
    return batch_of(combined, users), combined_mark


# Predictions


class GatherPredictions(Callback):
    """Makes `trainer.predict` return on every rank the predictions of a single process: each sample once, in order.

    Use it as `Trainer(callbacks=[GatherPredictions()])`. Every rank then holds all predictions, on CPU.
    """

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the predictions on all ranks. *Collective* over the data ranks.

        Raises:
            ConfigurationError: the order of a loader is unknown.
        """
        loop = trainer.predict_loop
        # Other strategies have no `dims`. `_padding_steps` refuses their loaders, whose order is unknown.
        dims = getattr(trainer.strategy, "dims", ParallelDims(replicate=trainer.world_size))
        if dims.data_size == 1 or not loop.return_predictions:
            return
        loaders = CombinedLoader(trainer.predict_dataloaders).flattened
        by_loader = [loop.predictions] if len(loaders) == 1 else loop.predictions
        for loader, predictions in zip(loaders, by_loader, strict=True):
            padding = _padding_steps(loader)
            steps = (step for step in range(len(predictions) + len(padding)) if step not in padding)
            gathered = dims.data_rank_group().gather(dict(zip(steps, predictions, strict=False)))
            # In each step, the ranks have consecutive batches.
            every_step = sorted(set().union(*gathered))
            predictions[:] = [batches[step] for step in every_step for batches in gathered if step in batches]


def _padding_steps(loader: Any) -> set[int]:
    sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    for source in (sampler, getattr(loader, "sampler", None), dataset):
        if isinstance(getattr(source, "shard", None), ShardSpec):
            return {step for step, mark in source.marks.items() if mark.is_padding}  # type: ignore[union-attr]
    raise ConfigurationError(
        f"GatherPredictions does not know in which order the ranks drew from {type(loader).__name__}: the "
        "strategy did not distribute it. Pass a DataLoader without a distributed sampler, and leave "
        "use_distributed_sampler=True."
    )
