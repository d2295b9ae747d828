"""Train as `check` does, and record every value of each step, or how far it is from the record."""

import io
import logging
import os
import pickle
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.utils.data import IterableDataset

from lightning_paral.callbacks.auto_resume import AutoResume
from lightning_paral.callbacks.monitor import ParalMonitor
from lightning_paral.callbacks.preemption import Preemption
from lightning_paral.compat.torch.modules import BatchNorm
from lightning_paral.distributed.hangs import library_of
from lightning_paral.errors import CheckpointError, ConfigurationError, ParalError, ProcessGroupError, RankFailedError
from lightning_paral.model.gradients import gradient_norm
from lightning_paral.strategies.base import ParalStrategy
from lightning_paral.strategies.checkpoint_mixin import CheckpointMixin

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
_DROPOUT = re.compile("drop", re.IGNORECASE)


def _auto() -> str:
    return "auto"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a run does. Paths are of folders that all ranks share."""

    steps: int
    folder: Path
    """The folder of all runs."""
    seed: int = 1
    accelerator: str = "cpu"
    strategy: Callable[[], Any] = _auto
    """A function that returns a value for `Trainer(strategy=...)`."""
    devices: int = 1
    in_float64: bool = True
    """Whether to train in fp64 instead of fp32, so that rounding cannot hide a difference."""
    is_reference: bool = False
    """Whether the run writes the record."""
    is_rounded: bool = False
    """Whether the parameters start with a rounding error."""
    save_to: Path | None = None
    """Where to save a checkpoint half way."""
    resume_from: Path | None = None
    keep_dropout: bool = False

    @property
    def reference(self) -> Path:
        """The folder of the record."""
        return self.folder / ("float64" if self.in_float64 else "given")


class Item(NamedTuple):
    """A value that a run has, and its difference from the record if it is a tensor."""

    at: tuple[int, int]
    """The epoch and the batch."""
    step: int
    """The number of the optimizer step that the batch ends or is part of, from 1."""
    kind: str
    name: str
    value: float
    """A number; for a tensor, its largest finite absolute value in the record."""
    off: float | None = None
    """For a tensor: the largest absolute difference from the record."""

    @property
    def key(self) -> tuple[tuple[int, int], str, str]:
        """What this item has in common with the same value of another run."""
        return self.at, self.kind, self.name


class Recorder(Callback):
    """Records every value of a run, or measures how far it is from the record. The first callback of a Trainer."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.profiler = _AfterBatch(self)
        self.items: list[Item] = []
        self.causes: set[str] = set()
        self.num_steps = 0
        self._at, self._step = (0, 0), 1
        self._num_norms = 0
        self._random_state = b""
        self._has_saved = False

    def numbers(self, kind: str, values: Mapping[str, Any]) -> None:
        """Record numbers, in the order of their names."""
        self.items += [Item(self._at, self._step, kind, name, float(values[name])) for name in sorted(values)]

    def _weights(self, trainer: Trainer, module: LightningModule) -> None:
        """Write parameters and buffers to the record, or measure how far they are from it."""
        path = self.task.reference / f"weights {self._at}.pt"
        if not self.task.is_reference and not path.exists():
            return  # the record has ended
        strategy = trainer.strategy
        values = strategy.full_state_dict() if isinstance(strategy, CheckpointMixin) else module.state_dict()
        trained = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        tensors = {name: value.detach().cpu() for name, value in values.items() if isinstance(value, Tensor)}
        if self.task.is_reference:
            torch.save(tensors, path)
        for name, value in torch.load(path, mmap=True, weights_only=True).items():
            kind = "parameter" if name in trained else "buffer"
            sizes = (value if value.is_complex() else value.double()).abs().nan_to_num(0.0, 0.0)
            largest = float(sizes.max()) if value.numel() else 0.0
            self.items.append(Item(self._at, self._step, kind, name, largest, _distance(tensors.get(name), value)))

    # Hooks, in the order of the step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare what `configure_model` has made, and look for BatchNorm."""
        if not self.task.keep_dropout:
            remove_dropout(pl_module)
        norms = [name for name, each in pl_module.named_modules() if isinstance(each, BatchNorm) and each.training]
        self.causes |= {f"BatchNorm ({name}) normalizes the samples of each rank" for name in norms[:1]}
        if self.task.is_rounded:
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.mul_(1 + torch.finfo(parameter.dtype).eps)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record what was drawn."""
        self._at, self._step, self._num_norms = (trainer.current_epoch, batch_idx), trainer.global_step + 1, 0
        if self.task.strategy is _auto:
            sums: list[float] = []
            apply_to_collection(batch, Tensor, lambda each: sums.append(each.sum(dtype=torch.float64).item()))
            self.numbers("batch", {f"tensor {index}": value for index, value in enumerate(sums)})
        self._random_state = _random_state()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Record the norm of the gradient before clipping. Code of the user may have clipped it already."""
        if pl_module.automatic_optimization:  # else the parameters after the step show it
            strategy, groups = trainer.strategy, optimizer.param_groups
            if isinstance(strategy, CheckpointMixin):
                norm = strategy.gradient_norm(optimizer)
            else:
                norm = gradient_norm(parameter for group in groups for parameter in group["params"])
            self.numbers("gradient norm", {f"of optimizer {self._num_norms}": norm})
            self._num_norms += 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss, and whether the step has drawn random numbers."""
        if self._random_state != _random_state():
            self.causes.add("random numbers are drawn in the step")
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            strategy = trainer.strategy  # with its weight, the mean over the ranks is that over all samples
            weight = strategy._data.loss_weight() if isinstance(strategy, ParalStrategy) else 1.0
            self.numbers("loss", {"": float(loss) * weight})

    def end_batch(self, trainer: Trainer, module: LightningModule) -> None:
        """Record what the batch leaves, after all hooks; save, and stop."""
        if trainer.global_step >= self._step or not module.automatic_optimization:
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            self.numbers("learning rate", {f"of group {index}": group["lr"] for index, group in enumerate(groups)})
            self._weights(trainer, module)
        self.numbers("log", trainer.callback_metrics)
        # Lightning does not count steps of optimizers that it does not wrap.
        num_windows = (trainer.fit_loop.total_batch_idx + 1) // trainer.accumulate_grad_batches
        self.num_steps = max(trainer.global_step, num_windows)
        trainer.should_stop |= self.num_steps >= self.task.steps
        if self.task.save_to is not None and not self._has_saved and self.num_steps >= self.task.steps // 2:
            self._has_saved = True
            trainer.save_checkpoint(self.task.save_to)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what a validation within the fit has logged."""
        if trainer.state.fn == TrainerFn.FITTING:
            self.numbers("validation", trainer.callback_metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what the epoch has logged, and see whether the dataset draws."""
        self.numbers("epoch log", trainer.callback_metrics)
        dataset: Any = getattr(trainer.train_dataloader, "dataset", None)
        if self.task.strategy is _auto and not isinstance(dataset, IterableDataset):
            with isolate_rng(), suppress(Exception):  # it may have no sample 0
                before = _random_state()
                dataset[0]
                if before != _random_state():
                    self.causes.add("random numbers are drawn by the dataset")


class _AfterBatch(PassThroughProfiler):
    """Lets a recorder look after the last hook of a batch, which is that of the module."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.trainer: Any = None

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Look after `on_train_batch_end` of the module."""
        yield action_name
        module = self.trainer.lightning_module
        if action_name == f"[LightningModule]{type(module).__name__}.on_train_batch_end":
            self._recorder.end_batch(self.trainer, module)


def _random_state() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy()))


def _distance(found: Tensor | None, expected: Tensor) -> float:
    if found is None or found.shape != expected.shape:
        return float("inf")
    if expected.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    found, expected = found.double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    off = torch.where(same, 0.0, (found - expected).abs().nan_to_num(nan=float("inf"), posinf=float("inf")))
    return off.max().item() if off.numel() else 0.0


def remove_dropout(module: Module) -> None:
    """Set to 0 what a module keeps as a probability of dropout: `p` of dropout layers, and numbers named so."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            is_probability = _DROPOUT.search(name) or (name == "p" and _DROPOUT.search(type(part).__name__))
            if is_probability and isinstance(value, float):
                setattr(part, name, 0.0)


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
