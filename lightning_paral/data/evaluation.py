"""Make Lightning's evaluation loops count each sample once, and gather predictions in the order of one process."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_paral.compat.lightning.loops import (
    EvaluationLoop,
    PredictionLoop,
    Step,
    call_at_end_of_loader,
    replace_step,
    set_results,
)
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.compat.torch.tensors import tree_leaves
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
        batch_idx, dataloader_idx, _ = place
        batch, mark = take_off_mark(batch)
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
            index = dataloader_idx if loop.num_dataloaders > 1 else None
            if results is not None:
                # At the end of the loader Lightning reads what this rank logged in earlier steps, under this index.
                results.dataloader_idx = index
            if self._run_padding:
                self._run_padding_step("predict" if results is None else self._stage, batch, batch_idx, index)

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

    def _run_padding_step(self, stage: str, batch: Any, batch_idx: int, dataloader_idx: int | None) -> None:
        """Run the step for a padding batch, and discard what it logs and changes. *Collective* if the step is.

        No batch-start or batch-end hooks are called, and the batch is not counted.
        """
        strategy, module, name = self._trainer.strategy, self._trainer.lightning_module, f"{stage}_step"
        if batch is None:
            raise ConfigurationError(
                f"This rank got no batch from a dataset that shards itself, and cannot join the {name} of others. "
                "Give every rank some data, or let the strategy shard the dataset: shard_iterable=True."
            )
        with ExitStack() as undo:
            # Not of the instance: a module that overrides `log` may call collectives there.
            undo.callback(replace_attributes(LightningModule, {"log": _discard}))
            undo.enter_context(rollback_side_effects(module))
            batch = self._trainer.precision_plugin.convert_input(batch)
            hook = "on_before_batch_transfer"
            data: Any = getattr(self._trainer, "datamodule", None)
            owner = data if data is not None and is_overridden(hook, data) else module
            batch = strategy.batch_to_device(
                getattr(owner, hook)(batch, dataloader_idx or 0), None, dataloader_idx or 0
            )
            takes_index = is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2)
            indices = ([batch_idx] if takes_index else []) + ([] if dataloader_idx is None else [dataloader_idx])
            getattr(strategy, name)(batch, *indices)


def _discard(*args: Any, **kwargs: Any) -> None:
    pass


def take_off_mark(batch: Any) -> tuple[Any, Mark]:
    """Return the user's batch, and how the step is divided.

    Raises:
        ConfigurationError: the batch combines those of several loaders, and one of them is marked.
    """
    if isinstance(batch, Marked):
        return batch.batch, batch.mark
    if any(isinstance(each, Marked) for each in tree_leaves(batch)):
        raise ConfigurationError(
            "An evaluation step got the batches of several loaders at once, from a CombinedLoader, and the ranks have "
            "different numbers of samples or, in a stream, may have. Return a list of loaders, which are evaluated one "
            "after the other, or combine the datasets in one loader."
        )
    return batch, EVEN


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
