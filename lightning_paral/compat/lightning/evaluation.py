"""Evaluation: steps and loaders of its loops."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSampler
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.lightning.results import ResultCollection
from lightning_paral.compat.private_name import Names, replace
from lightning_paral.compat.torch.tensors import tree_flatten, tree_unflatten

__all__ = ["EvaluationLoop", "IndexBatchSampler", "PredictionLoop"]

_STEP = "(batch, batch_idx, dataloader_idx, dataloader_iter)"
_LOOP = {"._combined_loader": "know how the loop combines several loaders"}

NAMES: Names = {
    "lightning.pytorch.loops._EvaluationLoop": {
        **_LOOP,
        f"_evaluation_step{_STEP}": "skip padding batches",
        "_store_dataloader_outputs": "reduce logged values before Lightning computes results",
        "._results": "log to a collection that counts each sample once",
    },
    "lightning.pytorch.loops._PredictionLoop": {**_LOOP, f"_predict_step{_STEP}": "skip padding batches"},
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": {
        "._results": "check that all ranks log the same keys",
    },
    "lightning.pytorch.trainer.call": {"_call_strategy_hook(trainer, hook_name)": "make self.log work in the step"},
    "lightning.pytorch.LightningModule": {
        "_on_before_batch_transfer(batch, dataloader_idx)": "call the hook of the module or its data module",
    },
    "lightning.pytorch.Trainer": {
        "._logger_connector": "compute results over all ranks; restore logging after a padding batch",
        "._data_connector": "distribute samples ourselves instead of with DistributedSampler",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector": {
        "._current_fx": "restore logging after a padding batch",
    },
    "lightning.pytorch.utilities.combined_loader.CombinedLoader": {
        "._mode": "know when a combination of loaders ends",
    },
    "torch.utils._pytree.TreeSpec": {"flatten_up_to": "find the item of each loader in a batch"},
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


def set_results(loop: EvaluationLoop, results: ResultCollection) -> None:
    """Make hooks log to `results` during `loop`."""
    replace(loop, "_results", results)


def set_results_of_fit(trainer: Trainer, results: ResultCollection) -> None:
    """Make hooks log to `results` during training."""
    replace(trainer.fit_loop.epoch_loop, "_results", results)


def combined_loader_of(loop: EvaluationLoop | PredictionLoop) -> CombinedLoader:
    """Return the combined loaders of `loop`, which must be running."""
    assert loop._combined_loader is not None
    return loop._combined_loader


def replace_step(loop: EvaluationLoop | PredictionLoop, run: Callable[..., None], undo: ExitStack) -> None:
    """Make `loop` call `run` instead of its own step, which is the first argument, until `undo` is closed."""
    name = "_predict_step" if isinstance(loop, PredictionLoop) else "_evaluation_step"
    shadow_method(loop, name, partial(run, getattr(loop, name)), undo)


def call_at_end_of_loader(loop: EvaluationLoop, trainer: Trainer, join: Callable[[], None], undo: ExitStack) -> None:
    """Call `join` at the end of each loader of `loop`, before results are computed, until `undo` is closed."""
    store_outputs = loop._store_dataloader_outputs

    def store() -> None:
        trainer._logger_connector.epoch_end_reached()
        join()
        store_outputs()

    shadow_method(loop, "_store_dataloader_outputs", store, undo)


def call_step_without_hooks(
    trainer: Trainer,
    loop: EvaluationLoop | PredictionLoop,
    hook_name: str,
    batch: Any,
    batch_idx: int,
    dataloader_idx: int | None,
) -> None:
    """Move a batch to the device and call the step with it. *Collective* if the step is.

    No batch-start or batch-end hooks are called, and the batch is not counted.

    Args:
        trainer: the Trainer of the loop.
        loop: the running loop.
        hook_name: `"validation_step"`, `"test_step"` or `"predict_step"`.
        batch: the batch as the loader returned it.
        batch_idx: the index of the batch.
        dataloader_idx: the index of the loader, or `None` if the loop has only one.
    """
    connector, module = trainer._logger_connector, trainer.lightning_module
    logged_by = connector._current_fx
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx or 0)
    batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx or 0)
    takes_index = is_param_in_hook_signature(getattr(module, hook_name), "batch_idx", min_args=2)
    indices = ([batch_idx] if takes_index else []) + ([] if dataloader_idx is None else [dataloader_idx])
    call._call_strategy_hook(trainer, hook_name, batch, *indices)
    connector._current_fx = logged_by


# How Lightning combines several loaders, and their batches


def mode_of(combined: CombinedLoader) -> str:
    """Return `"sequential"`, `"min_size"`, `"max_size"` or `"max_size_cycle"`."""
    mode: str = combined._mode
    return mode


def items_of(combined: CombinedLoader, batch: Any) -> list[Any]:
    """Return the item of each loader in `batch`, in the order of `combined.flattened`."""
    items: list[Any] = _spec_of(combined).flatten_up_to(batch)
    return items


def batch_of(combined: CombinedLoader, items: list[Any]) -> Any:
    """Return the batch that consists of `items`, one per loader in the order of `combined.flattened`."""
    return tree_unflatten(items, _spec_of(combined))


def _spec_of(combined: CombinedLoader) -> Any:
    loaders = set(map(id, combined.flattened))  # a list of numbers is one as well
    return tree_flatten(combined.iterables, is_leaf=lambda each: id(each) in loaders)[1]


# How Lightning prepares loaders for several ranks

Preparation = Callable[[object, bool, RunningStage], object]
"""Takes a loader, whether to shuffle it, and the running stage; returns the loader to use."""


def replace_preparation(trainer: Trainer, prepare: Preparation, undo: ExitStack) -> Preparation:
    """Replace Lightning's preparation of loaders with `prepare` until `undo` is closed; return Lightning's method."""
    connector = trainer._data_connector
    plain: Preparation = connector._prepare_dataloader
    shadow_method(connector, "_prepare_dataloader", prepare, undo)
    return plain
