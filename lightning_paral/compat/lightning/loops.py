"""The loops of the Trainer: steps, results, loaders, counters, where a fit stops or resumes, and its checkpoints."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core import saving
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSampler
from lightning.pytorch.trainer.states import RunningStage

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.lightning.results import ResultCollection
from lightning_paral.compat.private_name import Names, named, replace

__all__ = ["EvaluationLoop", "IndexBatchSampler", "PredictionLoop"]

_STEP = "(batch, batch_idx, dataloader_idx, dataloader_iter)"

NAMES: Names = {
    "lightning.pytorch.loops._FitLoop": {
        "._data_fetcher": "restart the training data at the position of a checkpoint",
        "advance": "leave an epoch that is not finished without its end hooks",
        "on_run_end": "leave a fit that is not finished without on_train_end",
    },
    "lightning.pytorch.loops._TrainingEpochLoop": {
        "._batches_that_stepped": "log values with the same step as Lightning does",
        "on_advance_end(data_fetcher)": "stop after a batch and its validation, before the next is fetched",
        "._results": "check that all ranks log the same keys",
        "_should_check_val_fx(data_fetcher)": "know whether Lightning counts a batch twice when a fit resumes",
    },
    "lightning.pytorch.Trainer": {
        "._checkpoint_connector": "choose the checkpoint that a fit resumes from",
        "._data_connector": "distribute samples ourselves instead of with DistributedSampler",
    },
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector": {
        "resume_start(checkpoint_path, weights_only)": "choose the checkpoint that a fit resumes from",
    },
    "lightning.pytorch.loops._EvaluationLoop": {
        f"_evaluation_step{_STEP}": "skip padding batches",
        "_store_dataloader_outputs": "reduce logged values before Lightning computes results",
        "._results": "log to a collection that counts each sample once",
    },
    "lightning.pytorch.loops._PredictionLoop": {f"_predict_step{_STEP}": "skip padding batches"},
    "lightning.pytorch.trainer.connectors.data_connector._DataConnector": {
        "_prepare_dataloader(dataloader, shuffle, mode)": "distribute samples ourselves",
    },
    "lightning.pytorch.overrides.distributed": {
        "_IndexBatchSamplerWrapper(batch_sampler)": "pass indices to callbacks that write predictions",
    },
    "lightning.pytorch.core.saving": {
        "pl_load(path_or_url, map_location, weights_only)": "let load_from_checkpoint read folders",
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


# The state and the loaders of the Trainer's loops


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether the current training batch ends without an optimizer step."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_last = progress.is_last_batch or progress.current.ready == trainer.num_training_batches
    steps_at_end = is_last and not trainer.strategy.handles_gradient_accumulation
    return progress.current.ready % trainer.accumulate_grad_batches != 0 and not steps_at_end


def training_data_has_started(trainer: Trainer) -> bool:
    """Return whether the fit has created its loaders and an iterator over them."""
    return trainer.fit_loop._data_fetcher is not None


def restart_training_data(trainer: Trainer) -> None:
    """Replace the iterator over the training loaders with a new one."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    fetcher.combined_loader.reset()
    iter(fetcher)


def evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Run evaluation under `no_grad` instead of inference mode, as Lightning does for its own FSDP.

    Parameters that are first gathered in inference mode would be inference tensors, which can never be trained.
    """
    evaluation = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop
    for loop in (*evaluation, trainer.predict_loop):
        replace(loop, "inference_mode", False)


# The step with which Lightning's training loop logs values


def step_of_loggers(trainer: Trainer) -> int:
    """Return the step with which Lightning logs values in a training batch."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


# Choose the checkpoint of a fit after the Trainer has started it


def choose_checkpoint(trainer: Trainer, choose: Callable[[Callable[[str], None]], None]) -> Callable[[], None]:
    """Let `choose` load a checkpoint at the start of the next fit, unless that fit has a `ckpt_path`.

    Call this in or before the `setup` hook of callbacks.

    Args:
        trainer: the Trainer.
        choose: called once, with a function that loads the checkpoint at a path. If this function raises, nothing has
            been restored, and it may be called again with another path; the last call must succeed. If it is not
            called, the fit does not resume.

    Returns:
        A function that undoes this. Calling it again, or after the checkpoint was chosen, has no effect.
    """
    connector: Any = trainer._checkpoint_connector
    load = connector.resume_start

    def undo() -> None:
        vars(connector).pop("resume_start", None)

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        undo()
        load(checkpoint_path, weights_only=weights_only)
        if not checkpoint_path:
            choose(partial(load, weights_only=weights_only))

    shadow_method(connector, "resume_start", resume_start)
    return undo


# Stop a fit between two batches, so that a resumed fit continues with the next one


def stop_between_batches(
    trainer: Trainer, ask: Callable[[int], int], on_stop: Callable[[], None], undo: ExitStack
) -> Callable[[], None]:
    """Ask from time to time, after a training batch and its validation, whether to call `on_stop` and end the fit.

    The hooks of the end of an epoch and of the training are not called. A checkpoint that `on_stop` saves resumes with
    the next batch.

    Args:
        trainer: the Trainer, at the beginning of a fit.
        ask: a function without side effects on the training, called with the number of batches after which the fit
            could stop. It cannot stop after the last one, and not in an accumulation window, whose gradients no
            checkpoint has. It returns 0 to stop, or after how many more of these batches to ask again.
        on_stop: a function that saves.
        undo: an `ExitStack` that restores Lightning's methods.

    Returns:
        A function that lets the next batch ask. With several ranks, all must call it before the same batch.
    """
    fit_loop: Any = trainer.fit_loop
    epoch_loop = fit_loop.epoch_loop
    advance, on_advance_end, on_run_end = fit_loop.advance, epoch_loop.on_advance_end, fit_loop.on_run_end
    has_stopped, num_batches, next_ask = False, 0, 1

    def ask_soon() -> None:
        nonlocal next_ask
        next_ask = 0

    def end_batch(data_fetcher: Any) -> None:
        nonlocal has_stopped, num_batches, next_ask
        on_advance_end(data_fetcher)
        if is_accumulating(trainer) or trainer.global_step >= trainer.max_steps > -1:
            return
        num_batches += 1
        if num_batches < next_ask:
            return
        # All ranks ask, also those of which only one has set `should_stop`.
        pause = ask(num_batches)
        next_ask = num_batches + pause
        if pause or (trainer.should_stop and epoch_loop.done):
            return
        # The resumed fit skips the validation that is done, but counts the batch again.
        is_counted_again = epoch_loop._should_check_val_fx(data_fetcher)
        epoch_loop._batches_that_stepped -= is_counted_again
        on_stop()
        epoch_loop._batches_that_stepped += is_counted_again
        has_stopped = True
        raise StopIteration

    def run_epoch() -> None:
        advance()
        if has_stopped:
            raise StopIteration

    def end_run() -> None:
        if not has_stopped:
            on_run_end()

    shadow_method(epoch_loop, "on_advance_end", end_batch, undo)
    shadow_method(fit_loop, "advance", run_epoch, undo)
    shadow_method(fit_loop, "on_run_end", end_run, undo)
    return ask_soon


# Let `load_from_checkpoint` read folders

_MARK = "_reads_folders"


def let_load_read_folders(is_folder: Callable[[Any], bool], read: Callable[..., Mapping[str, Any]]) -> None:
    """Make Lightning's `load_from_checkpoint` read folders as well. A second call changes nothing.

    It takes no `CheckpointIO`, and reads a path with `pl_load` of `lightning.pytorch.core.saving`, which raises
    `IsADirectoryError` for every sharded checkpoint, even for Lightning's own (2.6.6).

    Args:
        is_folder: called with a path or URL; returns whether it is a folder.
        read: called with the path, `map_location` and `weights_only`; returns the checkpoint.

    Raises:
        PrivateNameError: this version of Lightning reads checkpoints in a different way.
    """
    named(NAMES, "pl_load").resolve()
    module: Any = saving
    load = module.pl_load
    if hasattr(load, _MARK):
        return

    @wraps(load)
    def load_any(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if is_folder(path_or_url):
            return read(path_or_url, map_location=map_location, weights_only=weights_only)
        return load(path_or_url, map_location=map_location, weights_only=weights_only)

    setattr(load_any, _MARK, True)
    module.pl_load = load_any
