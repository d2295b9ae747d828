"""Lightning's evaluation loops, made to count each sample once: they pass over fillers and join uneven results."""

from contextlib import ExitStack
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils import _pytree as pytree

from lightning_paral.data.filler import Filler, Uneven, without_trace
from lightning_paral.data.logged import CheckedResults
from lightning_paral.data.results import EvaluationResults
from lightning_paral.errors import ConfigurationError


def replace(undo: ExitStack, instance: object, name: str, value: Any) -> None:
    """Shadow a method of `instance` until `undo` is closed."""
    instance.__dict__[name] = value
    undo.callback(instance.__dict__.pop, name, None)


class ExactEvaluation:
    """Takes part in the steps of Lightning's evaluation loops for the time of a run.

    Args:
        trainer: its loops for validation, test and prediction are changed until `undo` is closed.
        run_fillers: whether a filler step has to be run, for the collectives in it, or only passed over.
        undo: takes what undoes the changes.
    """

    def __init__(self, trainer: Trainer, run_fillers: bool, undo: ExitStack) -> None:
        self._trainer = trainer
        self._run_fillers = run_fillers
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            self._change_evaluation(loop, undo)
        self._change_prediction(trainer.predict_loop, undo)
        self._check_training(trainer, undo)

    def _check_training(self, trainer: Trainer, undo: ExitStack) -> None:
        loop, end_epoch = trainer.fit_loop, trainer.fit_loop.on_advance_end
        loop.epoch_loop._results = results = CheckedResults()

        def check_and_end_epoch() -> None:
            results.check_keys()
            end_epoch()

        replace(undo, loop, "on_advance_end", check_and_end_epoch)

    def _change_evaluation(self, loop: _EvaluationLoop, undo: ExitStack) -> None:
        evaluation_step, store_outputs = loop._evaluation_step, loop._store_dataloader_outputs
        loop._results = results = EvaluationResults()

        def step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
            assert loop._combined_loader is not None
            batch, is_filler, results.alone = resolve(batch, loop._combined_loader)
            results.alone |= dataloader_iter is not None  # no telling in which steps
            if not is_filler:
                evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
                return
            several = loop._is_sequential and loop.num_dataloaders > 1
            # What this rank may have logged before for the same loader is valid at its end.
            results.dataloader_idx = dataloader_idx if several else None
            if self._run_fillers:
                loop._results = EvaluationResults()
                loop._results.alone = True
                loop._results.dataloader_idx = results.dataloader_idx
                try:
                    hook_name = "test_step" if self._trainer.testing else "validation_step"
                    self._run_filler(loop, hook_name, batch, batch_idx, dataloader_idx if several else None)
                finally:
                    loop._results = results

        def store() -> None:
            results.alone = False
            self._trainer._logger_connector.epoch_end_reached()
            results.exchange(self._trainer.lightning_module)
            store_outputs()

        replace(undo, loop, "_evaluation_step", step)
        replace(undo, loop, "_store_dataloader_outputs", store)

    def _change_prediction(self, loop: _PredictionLoop, undo: ExitStack) -> None:
        predict_step = loop._predict_step

        def step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
            assert loop._combined_loader is not None
            batch, is_filler, _ = resolve(batch, loop._combined_loader)
            if not is_filler:
                predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            elif self._run_fillers:
                several = loop.num_dataloaders > 1
                self._run_filler(loop, "predict_step", batch, batch_idx, dataloader_idx if several else None)

        replace(undo, loop, "_predict_step", step)

    def _run_filler(
        self,
        loop: _EvaluationLoop | _PredictionLoop,
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
        connector = trainer._logger_connector
        logged_by = connector._current_fx
        with without_trace(trainer.lightning_module):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx or 0)
            batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx or 0)
            kwargs = loop._build_kwargs(batch, batch_idx, dataloader_idx)
            call._call_strategy_hook(trainer, hook_name, *loop._build_step_args_from_hook_kwargs(kwargs, hook_name))
        connector._current_fx = logged_by


def resolve(batch: Any, combined: CombinedLoader) -> tuple[Any, bool, bool]:
    """Return the batch as the user's loaders made it, whether it is a filler, and whether another rank's may be.

    Several loaders that are read at once, and not one after the other, end as in one process: with the shortest in
    `"min_size"`, else with the longest.
    """
    if combined._mode == "sequential":
        return _bare(batch), isinstance(batch, Filler), isinstance(batch, Filler | Uneven)
    items = combined._spec.flatten_up_to(batch)
    lengths = [sized_len(loader) or 0 for loader in combined.flattened]
    decisive = [item for item, length in zip(items, lengths, strict=True) if length == max(lengths)]
    if combined._mode == "min_size":
        is_filler = any(isinstance(item, Filler) for item in items)
    else:
        is_filler = all(isinstance(item, Filler) for item in decisive)
    if combined._mode == "max_size" and not is_filler:
        items = [None if isinstance(item, Filler) else item for item in items]
    uneven = any(isinstance(item, Filler | Uneven) for item in items)
    return pytree.tree_unflatten([_bare(item) for item in items], combined._spec), is_filler, uneven


def _bare(batch: Any) -> Any:
    return batch.batch if isinstance(batch, Filler | Uneven) else batch
