"""One run of `check` on a rank: train what a user's functions make, with what records or measures it."""

import io
import json
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_paral.callbacks.auto_resume import AutoResume
from lightning_paral.callbacks.monitor import ParalMonitor
from lightning_paral.callbacks.preemption import Preemption
from lightning_paral.compat.torch.dispatch import TorchDispatchMode
from lightning_paral.diagnostics.check_record import Item, Recorder, Task, remove_dropout
from lightning_paral.distributed.frames import library_of
from lightning_paral.errors import CheckpointError, ConfigurationError, ParalError, ProcessGroupError, RankFailedError
from lightning_paral.strategies.base import ParalStrategy

_aten = torch.ops.aten
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

    kind: str
    message: str
    is_ours: bool
    place: str
    """The innermost line of user code."""

    def __str__(self) -> str:
        """Return the first sentence of the message; of errors that are not ours, also the kind and the place."""
        sentence = re.split(r"(?<=[.!]) (?=[A-Z])", " ".join(self.message.split()))[0]
        return sentence if self.is_ours else f"{self.kind}: {sentence}" + (f" ({self.place})" if self.place else "")


def run(make: Callable[[], Fit], task: Task) -> Ran | Raised:
    """Train what `make` returns as `task` says. *Collective* over the ranks of the pool."""
    try:
        with _quiet(), isolate_rng():
            return _run(make, task)
    except BaseException as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not library_of(each.filename)]
        frames = [each for each in frames if not each.name.startswith("<")]  # such as a comprehension
        place = f"{frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        is_ours = isinstance(error, ParalError) and not isinstance(error, _FAILURES)
        raised = Raised(type(error).__name__, str(error), is_ours, place)
        # Another rank may wait for this one until the pool ends it.
        (task.reference / f"raised-{os.environ['RANK']}.json").write_text(json.dumps(raised))
        return raised


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output, and restore what a run changes in its process."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning_paral")]
    levels, num_threads = [logger.level for logger in loggers], torch.get_num_threads()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        torch.set_num_threads(num_threads)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _run(make: Callable[[], Fit], task: Task) -> Ran:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // task.devices))
    seed_everything(task.seed, workers=True, verbose=False)
    fit = make()
    recorder = Recorder(task)
    callbacks = [each for each in _as_list(fit.trainer.get("callbacks")) if not isinstance(each, _OMITTED_CALLBACKS)]
    limit = fit.trainer.get("limit_val_batches")
    options: dict[str, Any] = {name: value for name, value in fit.trainer.items() if name not in _OMITTED}
    options |= {
        "limit_val_batches": task.steps // 2 if limit in (None, 1.0) else min(limit, task.steps // 2),
        "callbacks": [recorder, *callbacks],
    }
    if task.in_float64:
        if options.get("precision") not in _WIDE or options.get("plugins"):
            raise ConfigurationError(f"precision={options.get('precision')!r} was chosen.")  # the given one is checked
        options |= {"precision": None, "plugins": [DoublePrecision()]}
        fit.module.double()  # Lightning converts it only after it has loaded a checkpoint into it
    strategy = task.strategy()
    if isinstance(strategy, ParalStrategy):
        strategy.sampling = replace(strategy.sampling, split="global")  # each step has the samples of one process
    trainer = Trainer(
        strategy=strategy,
        devices=task.devices,
        accelerator=task.accelerator,
        max_epochs=max(fit.trainer.get("max_epochs") or 0, task.steps),  # schedulers may read it
        max_steps=task.steps,
        num_sanity_val_steps=0,
        logger=DummyLogger(),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=task.reference,
        **options,
    )
    if not task.keep_dropout:
        remove_dropout(fit.module)
    train, validation = fit.data if isinstance(fit.data, tuple) else (fit.data, None)
    is_module = isinstance(train, LightningDataModule)
    data = {"datamodule": train} if is_module else {"train_dataloaders": train, "val_dataloaders": validation}
    with ReorderedSums() if task.reorders_sums else nullcontext():  # type: ignore[no-untyped-call]
        seed_everything(task.seed, workers=True, verbose=False)
        trainer.fit(fit.module, **data, ckpt_path=task.resume_from, weights_only=False)
        module = trainer.lightning_module  # that of the user, if it was compiled
        source = train if is_module else module
        if is_overridden("validation_step", module) and (
            validation is not None or is_overridden("val_dataloader", source)
        ):
            given = {"datamodule": train} if is_module else {"dataloaders": validation}
            trainer.validate(fit.module, **given, verbose=False)
            recorder.numbers("evaluation", trainer.callback_metrics)
    return Ran(recorder.items, sorted(recorder.causes), str(trainer.precision), recorder.num_steps)


def _as_list(callbacks: Any) -> list[Callback]:
    return list(callbacks) if isinstance(callbacks, list | tuple) else [] if callbacks is None else [callbacks]


class ReorderedSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes matrix products and sums in the opposite order, which changes nothing but their rounding."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on operands that are flipped along the dimensions it sums over."""
        return func(*_flipped(func, args), **(kwargs or {}))


def _flipped(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if func in (_aten.mm.default, _aten.bmm.default):
        return _contracted(*args)
    if func in (_aten.addmm.default, _aten.baddbmm.default):
        return args[0], *_contracted(*args[1:3]), *args[3:]
    if func in (_aten.sum.dim_IntList, _aten.mean.dim) and args[1]:
        return args[0].flip(args[1]), *args[1:]
    if func in (_aten.sum.default, _aten.mean.default):
        return args[0].flatten().flip(0), *args[1:]
    if func is _aten.convolution.default and args[8] == 1:
        return args[0].flip(1), args[1].flip(1), *args[2:]
    if func is _aten.embedding_dense_backward.default:
        return args[0].flip(0), args[1].flip(0), *args[2:]
    return args


def _contracted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.flip(-1), b.flip(-2)
