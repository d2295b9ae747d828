"""One run of `check` on a rank: train, and record what each step leaves behind, or measure how far it is from it."""

import io
import json
import logging
import os
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_paral.callbacks.auto_resume import AutoResume
from lightning_paral.callbacks.monitor import ParalMonitor
from lightning_paral.callbacks.preemption import Preemption
from lightning_paral.checkpoint.state.ended_optimizers import EndedOptimizers
from lightning_paral.checkpoint.tensor_state import TensorState
from lightning_paral.diagnostics.check_hooks import watch_hooks
from lightning_paral.diagnostics.check_variants import ReorderedSums, find_batch_norms, remove_dropout
from lightning_paral.distributed.hangs.user_frames import library_of
from lightning_paral.errors import CheckpointError, ConfigurationError, ParalError, ProcessGroupError, RankFailedError
from lightning_paral.strategies.base import ParalStrategy
from lightning_paral.strategies.full_reads import FullTensorReaders

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


def _auto() -> str:
    return "auto"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a run trains. Each run makes its own."""

    module: LightningModule
    data: Any = None
    """What `Trainer.fit` takes: a LightningDataModule, training data, or a tuple of training and validation data."""
    trainer: Mapping[str, Any]
    """Options of the Trainer."""


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
    reference: Path = Path()
    """The folder of the record."""
    is_reference: bool = False
    """Whether the run writes the record."""
    reorders_sums: bool = False
    save_to: Path | None = None
    """Where to save a checkpoint half way."""
    resume_from: Path | None = None
    keep_dropout: bool = False
    hooks: bool = False
    """Whether to compare parameters after each hook as well."""


class Item(NamedTuple):
    """A value that a run has, and its difference from the record if it is a tensor."""

    epoch: int
    batch: int
    step: int
    """The number of the optimizer step that the batch ends or is part of, from 1."""
    kind: str
    name: str
    value: float = 0.0
    """A number; for a tensor, its largest absolute value in the record."""
    off: float | None = None
    """For a tensor: the largest absolute difference from the record."""
    place: str = ""
    """The hook after which it was looked at; at the end of the batch if empty."""

    @property
    def key(self) -> tuple[int, int, str, str, str]:
        """What this item has in common with the same value of another run."""
        return self.epoch, self.batch, self.place, self.kind, self.name


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


class Recorder(Callback):
    """Records every value of a run, or measures how far it is from the record."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.items: list[Item] = []
        self.causes: set[str] = set()
        self.num_steps = 0
        self._at = 0, 0, 1  # epoch, batch, step
        self._record: dict[str, Tensor] = {}
        """The tensors of the record up to now."""
        self._num_read = 0
        self._random_state: Any = None
        self._has_saved = False
        self._num_norms = 0
        self._calls: Counter[str] = Counter()
        """How often each hook was called in the current batch."""

    def numbers(self, kind: str, values: Mapping[str, Any]) -> None:
        """Record numbers, in the order of their names."""
        for name in sorted(values):
            self.items.append(Item(*self._at, kind, name, float(values[name])))

    def tensors(self, what: str, kinds: Mapping[str, str], values: Mapping[str, Tensor], place: str = "") -> None:
        """Write tensors that have changed to the record, or measure how far they are from it."""
        if place:
            self._calls[place] += 1
            place += f", call {self._calls[place]}" if self._calls[place] > 1 else ""
        path = self.task.reference / f"{self._at[0]}-{self._at[1]} {what} {place}.pt"
        order = self.task.reference / "order.txt"
        if self.task.is_reference:
            new = {name: value for name, value in values.items() if not _equal(self._record.get(name), value)}
            self._record |= {name: value.detach().cpu().clone() for name, value in new.items()}
            torch.save({name: self._record[name] for name in new}, path)
            with order.open("a") as file:
                file.write(f"{path.name}\n")
        else:
            names = order.read_text().splitlines()
            if path.name not in names:
                return  # the record has ended
            position = names.index(path.name) + 1
            for name in names[self._num_read : position]:
                self._record |= torch.load(path.with_name(name), mmap=True, weights_only=True)
            self._num_read = position
        for name, kind in kinds.items():
            expected = self._record[name]
            finite = (
                expected.abs().nan_to_num(nan=0.0, posinf=0.0) if expected.dtype.is_floating_point else expected.abs()
            )
            scale = float(finite.max()) if expected.numel() else 0.0
            off = _distance(values[name], expected) if name in values else float("inf")
            self.items.append(Item(*self._at, kind, name, scale, off, place))

    # Hooks, in the order of the step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record after the last hook of a batch, that of the module, which Lightning calls after all callbacks."""
        if stage != "fit":
            return
        if self.task.hooks:
            watch_hooks(self, trainer, pl_module, lambda place: self._weights(trainer, pl_module, f"after {place}"))
        end_batch = pl_module.on_train_batch_end

        def recorded(outputs: Any, batch: Any, batch_idx: int) -> None:
            end_batch(outputs, batch, batch_idx)
            self._end_batch(trainer, pl_module, outputs)

        pl_module.on_train_batch_end = recorded  # type: ignore[method-assign]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove dropout from what `configure_model` has made, and look for BatchNorm."""
        if not self.task.keep_dropout:
            remove_dropout(pl_module)
        self.causes |= find_batch_norms(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record what was drawn."""
        self._at = trainer.current_epoch, batch_idx, trainer.global_step + 1
        if self.task.strategy is _auto:
            self.numbers("batch", {f"tensor {index}": value for index, value in enumerate(_sums(batch))})
        self._random_state, self._num_norms = _random_state(), 0
        self._calls.clear()
        self._weights_of_hook(trainer, pl_module, "before the step")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Record the norm of the gradient before clipping. Code of the user may have clipped it already."""
        if not pl_module.automatic_optimization:
            return  # the parameters after the step show it
        name, self._num_norms = f"of optimizer {self._num_norms}", self._num_norms + 1
        self.numbers("gradient norm", {name: _reader(trainer, pl_module).gradient_norm(optimizer)})

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Look at what `training_step` leaves, if hooks are watched."""
        self._weights_of_hook(trainer, pl_module, "after training_step")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Look at what the optimizer leaves, if hooks are watched."""
        place = "after the optimizer step" if pl_module.automatic_optimization else "after training_step"
        self._weights_of_hook(trainer, pl_module, place)

    def _weights_of_hook(self, trainer: Trainer, module: LightningModule, place: str) -> None:
        if self.task.hooks:
            self._weights(trainer, module, place)

    def _end_batch(self, trainer: Trainer, module: LightningModule, outputs: Any) -> None:
        if self._random_state != _random_state():
            self.causes.add("random numbers are drawn in the step")
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        weight = _loss_weight(trainer)
        if loss is not None:
            self.numbers("loss", {"": float(loss) * weight})
        if trainer.global_step >= self._at[2] or not module.automatic_optimization:
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

    def _weights(self, trainer: Trainer, module: LightningModule, place: str = "") -> None:
        strategy = trainer.strategy
        values = strategy.full_state_dict() if isinstance(strategy, FullTensorReaders) else module.state_dict()
        trained = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        values = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        kinds = {name: "parameter" if name in trained else "buffer" for name in values}
        self.tensors("weights", kinds, values, place)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what the epoch has logged and the states of the optimizers, and see whether the dataset draws."""
        del pl_module.on_train_batch_end
        if self.task.resume_from is None:  # which has a part of the epoch only
            self.numbers("epoch log", trainer.callback_metrics)
        dataset: Any = getattr(trainer.train_dataloader, "dataset", None)
        if self.task.strategy is _auto and not isinstance(dataset, IterableDataset):
            with isolate_rng(), suppress(Exception):  # it may have no sample 0
                before = _random_state()
                dataset[0]
                if before != _random_state():
                    self.causes.add("random numbers are drawn by the dataset")
        reader, path = _reader(trainer, pl_module), self.task.reference / "optimizers.json"
        names = dict(pl_module.named_parameters())
        if self.task.is_reference:
            states = [(n, p, o.state.get(p, {})) for o in trainer.optimizers for n, p in names.items()]
            # Under ZeRO, only states with the shape of the parameter are read in full. The number of steps is none.
            path.write_text(json.dumps([(n, k) for n, p, s in states for k, v in s.items() if _has_shape(v, p)]))
        kinds, found = {}, {}
        for name, key in json.loads(path.read_text()):
            kinds[f"{key} of {name}"] = "optimizer state"
            with suppress(ValueError):  # the optimizer lacks it
                found[f"{key} of {name}"] = reader.full_optimizer_state(names[name], key)
        self.tensors("optimizers", kinds, found)


def _reader(trainer: Trainer, module: LightningModule) -> Any:
    strategy = trainer.strategy
    if isinstance(strategy, FullTensorReaders):
        return strategy
    return TensorState(module, trainer.optimizers, strategy.root_device, EndedOptimizers())


def _loss_weight(trainer: Trainer) -> float:
    """Return by what to multiply a mean over this rank's samples, so that the mean over ranks is that over all."""
    strategy = trainer.strategy
    return strategy._data.loss_weight() if isinstance(strategy, ParalStrategy) else 1.0


def _random_state() -> tuple[Any, ...]:
    of_numpy: Any = np.random.get_state()
    return random.getstate(), of_numpy[1].tolist(), torch.get_rng_state().tolist()


def _has_shape(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0


def _sums(batch: Any) -> list[float]:
    sums: list[float] = []
    apply_to_collection(batch, Tensor, lambda each: sums.append(each.sum(dtype=torch.float64).item()))
    return sums


def _equal(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.cpu())


def _distance(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if expected.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    found, expected = found.detach().cpu().double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    off = torch.where(same, 0.0, (found - expected).abs().nan_to_num(nan=float("inf"), posinf=float("inf")))
    return off.max().item() if off.numel() else 0.0
