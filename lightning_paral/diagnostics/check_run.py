"""One run of `check` on a rank: train what a user's functions make, with what records or measures it."""

import io
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_paral.callbacks.auto_resume import AutoResume
from lightning_paral.callbacks.monitor import ParalMonitor
from lightning_paral.callbacks.preemption import Preemption
from lightning_paral.diagnostics.check_record import Item, Recorder, Task, remove_dropout
from lightning_paral.distributed.hangs import library_of
from lightning_paral.errors import CheckpointError, ConfigurationError, ParalError, ProcessGroupError, RankFailedError
from lightning_paral.strategies.base import ParalStrategy

_OMITTED_CALLBACKS = (Checkpoint, ProgressBar, ModelSummary, AutoResume, Preemption, ParalMonitor)
_OMITTED = (
    *("accelerator", "devices", "num_nodes", "strategy", "logger", "profiler", "default_root_dir", "fast_dev_run"),
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "num_sanity_val_steps", "log_every_n_steps"),
    *("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "enable_autolog_hparams", "barebones"),
)
"""Options of the Trainer that change no numbers, and those that a run of `check` sets itself."""
_FAILURES = (RankFailedError, ProcessGroupError, CheckpointError)
"""Errors of this package that are no refusals."""
_WIDE = (None, 32, "32", "32-true", 64, "64", "64-true")
"""The precisions instead of which a run can be in fp64."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a run trains. Each run makes its own."""

    module: LightningModule
    data: Any = None
    """What `Trainer.fit` takes: a LightningDataModule, training data, or a tuple of training and validation data."""
    trainer: Mapping[str, Any]
    """Options of the Trainer."""


class Ran(NamedTuple):
    """What a run on one rank has found."""

    items: list[Item]
    causes: list[str]
    """What the module does that makes ranks differ from one process by its nature."""
    precision: str
    """That of the Trainer."""
    num_steps: int
    """The number of optimizer steps, or of batches if Lightning does not count the steps."""


class Raised(NamedTuple):
    """The error that ended a run on one rank."""

    sentence: str
    """The first sentence of the message; of errors that are no refusals, also the kind and the innermost line of user
    code."""
    is_refusal: bool = False
    """Whether it is a refusal of this package."""


def run(make: Callable[[], Fit], task: Task) -> Ran | Raised:
    """Train what `make` returns as `task` says. *Collective* over the ranks of the pool."""
    try:
        with _quiet(), isolate_rng():
            return _run(make, task)
    except BaseException as error:
        return _raised(error)


def _raised(error: BaseException) -> Raised:
    sentence = re.split(r"(?<=[.!]) (?=[A-Z])", " ".join(str(error).split()))[0]
    if isinstance(error, ParalError) and not isinstance(error, _FAILURES):
        return Raised(sentence, True)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not library_of(each.filename)]
    frames = [each for each in frames if not each.name.startswith("<")]  # such as a comprehension
    place = f" ({frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return Raised(f"{type(error).__name__}: {sentence}{place}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output, and restore what a run changes in its process."""
    num_threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(num_threads)
        logging.disable(disabled)


def _run(make: Callable[[], Fit], task: Task) -> Ran:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // task.devices))
    seed_everything(task.seed, workers=True, verbose=False)
    fit, recorder = make(), Recorder(task)
    trainer = _trainer(fit, task, recorder)
    if not task.keep_dropout:
        remove_dropout(fit.module)
    train, validation = fit.data if isinstance(fit.data, tuple) else (fit.data, None)
    is_module = isinstance(train, LightningDataModule)
    data = {"datamodule": train} if is_module else {"train_dataloaders": train, "val_dataloaders": validation}
    seed_everything(task.seed, workers=True, verbose=False)
    trainer.fit(fit.module, **data, ckpt_path=task.resume_from, weights_only=False)
    module = trainer.lightning_module  # that of the user, if it was compiled
    has_data = validation is not None or is_overridden("val_dataloader", train if is_module else module)
    if has_data and is_overridden("validation_step", module):
        given = {"datamodule": train} if is_module else {"dataloaders": validation}
        trainer.validate(fit.module, **given, verbose=False)
        recorder.numbers("evaluation", trainer.callback_metrics)
    return Ran(recorder.items, sorted(recorder.causes), str(trainer.precision), recorder.num_steps)


def _trainer(fit: Fit, task: Task, recorder: Recorder) -> Trainer:
    given = {name: value for name, value in fit.trainer.items() if name not in _OMITTED}
    if task.in_float64:
        if given.get("precision") not in _WIDE or given.get("plugins"):
            raise ConfigurationError(f"precision={given.get('precision')!r} was chosen.")  # the given one is checked
        given |= {"precision": None, "plugins": [DoublePrecision()]}
        fit.module.double()  # Lightning converts it only after it has loaded a checkpoint into it
    callbacks, limit = given.pop("callbacks", None) or [], given.pop("limit_val_batches", None)
    callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    strategy = task.strategy()
    if isinstance(strategy, ParalStrategy):
        strategy.sampling = replace(strategy.sampling, split="global")  # each step has the samples of one process
    recorder.profiler.trainer = trainer = Trainer(
        strategy=strategy,
        devices=task.devices,
        accelerator=task.accelerator,
        callbacks=[recorder, *(each for each in callbacks if not isinstance(each, _OMITTED_CALLBACKS))],
        profiler=recorder.profiler,
        max_epochs=max(fit.trainer.get("max_epochs") or 0, task.steps),  # schedulers may read it
        max_steps=task.steps,
        limit_val_batches=task.steps // 2 if limit in (None, 1.0) else min(limit, task.steps // 2),
        num_sanity_val_steps=0,
        logger=DummyLogger(),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=task.reference,
        **given,
    )
    return trainer
