"""Evaluation: steps, results and loaders of its loops."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSampler
from lightning.pytorch.trainer.states import RunningStage

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.lightning.results import ResultCollection
from lightning_paral.compat.private_name import Names, replace

__all__ = ["EvaluationLoop", "IndexBatchSampler", "PredictionLoop"]

_STEP = "(batch, batch_idx, dataloader_idx, dataloader_iter)"

NAMES: Names = {
    "lightning.pytorch.loops._EvaluationLoop": {
        f"_evaluation_step{_STEP}": "skip padding batches",
        "_store_dataloader_outputs": "reduce logged values before Lightning computes results",
        "._results": "log to a collection that counts each sample once",
    },
    "lightning.pytorch.loops._PredictionLoop": {f"_predict_step{_STEP}": "skip padding batches"},
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": {
        "._results": "check that all ranks log the same keys",
    },
    "lightning.pytorch.Trainer": {
        "._data_connector": "distribute samples ourselves instead of with DistributedSampler"
    },
    "lightning.pytorch.trainer.connectors.data_connector._DataConnector": {
        "_prepare_dataloader(dataloader, shuffle, mode)": "distribute samples ourselves",
    },
    "lightning.pytorch.overrides.distributed": {
        "_IndexBatchSamplerWrapper(batch_sampler)": "pass indices to callbacks that write predictions",
    },
}


# The steps of Lightning's validation, test and prediction loops, and the collections to which they log

Step = Callable[[Any, int, int, Any], None]
"""Takes a batch, its index, the loader's index, and the iterator if the step draws batches itself."""


def set_results(loop: object, results: ResultCollection) -> None:
    """Make hooks log to `results` during `loop`, an evaluation loop or the loop of an epoch of training."""
    replace(loop, "_results", results)


def replace_step(loop: EvaluationLoop | PredictionLoop, run: Callable[..., None], undo: ExitStack) -> None:
    """Make `loop` call `run` instead of its own step, which is the first argument, until `undo` is closed."""
    name = "_predict_step" if isinstance(loop, PredictionLoop) else "_evaluation_step"
    shadow_method(loop, name, partial(run, getattr(loop, name)), undo)


def call_at_end_of_loader(loop: EvaluationLoop, trainer: Trainer, join: Callable[[], None], undo: ExitStack) -> None:
    """Call `join` at the end of each loader of `loop`, before results are computed, until `undo` is closed."""
    store_outputs = loop._store_dataloader_outputs

    def store() -> None:
        join()
        store_outputs()

    shadow_method(loop, "_store_dataloader_outputs", store, undo)


# How Lightning prepares loaders for several ranks

Preparation = Callable[[object, bool, RunningStage], object]
"""Takes a loader, whether to shuffle it, and the running stage; returns the loader to use."""


def replace_preparation(trainer: Trainer, prepare: Preparation, undo: ExitStack) -> Preparation:
    """Replace Lightning's preparation of loaders with `prepare` until `undo` is closed; return Lightning's method."""
    connector = trainer._data_connector
    plain: Preparation = connector._prepare_dataloader
    shadow_method(connector, "_prepare_dataloader", prepare, undo)
    return plain
