"""Lightning's evaluation loops, made to count each sample once: they pass over fillers and join uneven results."""

from contextlib import ExitStack
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
    call_step_alone,
    combined_loader_of,
    replace_evaluation_step,
    replace_predict_step,
    set_results,
    set_results_of_fit,
)
from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.data.logged_keys import CheckedResults
from lightning_paral.data.padding import MaybeUneven, PaddingBatch, rollback_side_effects
from lightning_paral.data.uneven_results import UnevenResults
from lightning_paral.errors import ConfigurationError


class ExactEvaluationLoops:
    """Takes part in the steps of Lightning's evaluation loops for the time of a run.

    Args:
        trainer: its loops for validation, test and prediction are changed until `undo` is closed.
        run_padding: whether a filler step has to be run, for the collectives in it, or only passed over.
        undo: takes what undoes the changes.
    """

    def __init__(self, trainer: Trainer, run_padding: bool, undo: ExitStack) -> None:
        self._trainer = trainer
        self._run_padding = run_padding
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            self._change_evaluation(loop, undo)
        self._change_prediction(trainer.predict_loop, undo)
        self._check_training(trainer, undo)

    def _check_training(self, trainer: Trainer, undo: ExitStack) -> None:
        loop, end_epoch = trainer.fit_loop, trainer.fit_loop.on_advance_end
        results = CheckedResults()
        set_results_of_fit(trainer, results)

        def check_and_end_epoch() -> None:
            results.check_keys()
            end_epoch()

        shadow_method(loop, "on_advance_end", check_and_end_epoch, undo)

    def _change_evaluation(self, loop: EvaluationLoop, undo: ExitStack) -> None:
        results = UnevenResults()
        set_results(loop, results)

        def skipping_padding(evaluation_step: Step) -> Step:
            def step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
                combined = combined_loader_of(loop)
                batch, is_padding, results.rank_local = resolve(batch, combined)
                # A step that draws its batches itself: how many steps it takes may differ by rank.
                results.rank_local |= dataloader_iter is not None
                if not is_padding:
                    evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
                    return
                several = mode_of(combined) == "sequential" and loop.num_dataloaders > 1
                # What this rank has logged earlier for this loader is used at the loader's end.
                results.dataloader_idx = dataloader_idx if several else None
                if self._run_padding:
                    put_aside = UnevenResults()
                    put_aside.rank_local = True
                    put_aside.dataloader_idx = results.dataloader_idx
                    set_results(loop, put_aside)
                    try:
                        hook_name = "test_step" if self._trainer.testing else "validation_step"
                        self._run_padding_step(loop, hook_name, batch, batch_idx, dataloader_idx if several else None)
                    finally:
                        set_results(loop, results)

            return step

        def join() -> None:
            results.rank_local = False
            results.exchange(self._trainer.lightning_module)

        replace_evaluation_step(loop, skipping_padding, undo)
        call_at_end_of_loader(loop, self._trainer, join, undo)

    def _change_prediction(self, loop: PredictionLoop, undo: ExitStack) -> None:
        def skipping_padding(predict_step: Step) -> Step:
            def step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
                batch, is_padding, _ = resolve(batch, combined_loader_of(loop))
                if not is_padding:
                    predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
                elif self._run_padding:
                    several = loop.num_dataloaders > 1
                    self._run_padding_step(loop, "predict_step", batch, batch_idx, dataloader_idx if several else None)

            return step

        replace_predict_step(loop, skipping_padding, undo)

    def _run_padding_step(
        self,
        loop: EvaluationLoop | PredictionLoop,
        hook_name: str,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int | None,
    ) -> None:
        """Call the step with a batch that does not count. *Collective* where the step is."""
        trainer = self._trainer
        if batch is None:
            raise ConfigurationError(
                f"Rank {trainer.global_rank} got no batch at all from a dataset that shards itself, so it has nothing "
                f"to take part with in the collectives of the others' {hook_name}. Give every rank a part of the data, "
                "or let it be sharded here: shard_iterable=True."
            )
        with rollback_side_effects(trainer.lightning_module):
            call_step_alone(trainer, loop, hook_name, batch, batch_idx, dataloader_idx)


def resolve(batch: Any, combined: CombinedLoader) -> tuple[Any, bool, bool]:
    """Return the batch as the user's loaders made it, whether it is a filler, and whether another rank's may be.

    Several loaders that are read at once, and not one after the other, end as in one process: with the shortest in
    `"min_size"`, else with the longest.
    """
    mode = mode_of(combined)
    if mode == "sequential":
        return _unwrap(batch), isinstance(batch, PaddingBatch), isinstance(batch, PaddingBatch | MaybeUneven)
    items = items_of(combined, batch)
    lengths = [sized_len(loader) or 0 for loader in combined.flattened]
    decisive = [item for item, length in zip(items, lengths, strict=True) if length == max(lengths)]
    if mode == "min_size":
        is_padding = any(isinstance(item, PaddingBatch) for item in items)
    else:
        is_padding = all(isinstance(item, PaddingBatch) for item in decisive)
    if mode == "max_size" and not is_padding:
        items = [None if isinstance(item, PaddingBatch) else item for item in items]
    uneven_steps = any(isinstance(item, PaddingBatch | MaybeUneven) for item in items)
    return batch_of(combined, [_unwrap(item) for item in items]), is_padding, uneven_steps


def _unwrap(batch: Any) -> Any:
    return batch.batch if isinstance(batch, PaddingBatch | MaybeUneven) else batch
