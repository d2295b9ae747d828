"""What `check` records of a run at every step, or how far a run is from the record."""

import inspect
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module
from torch.utils.data import IterableDataset

from lightning_paral.checkpoint.state.ended_optimizers import EndedOptimizers
from lightning_paral.checkpoint.tensor_state import TensorState
from lightning_paral.compat.torch.normalization import BatchNorm
from lightning_paral.strategies.base import ParalStrategy
from lightning_paral.strategies.full_reads import FullTensorReaders

_HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad"),
    *("on_train_batch_end", "lr_scheduler_step"),
)
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


def remove_dropout(module: Module) -> None:
    """Set to 0 what a module keeps as a probability of dropout: `p` of dropout layers, and numbers named so."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            is_probability = _DROPOUT.search(name) or (name == "p" and _DROPOUT.search(type(part).__name__))
            if is_probability and isinstance(value, float):
                setattr(part, name, 0.0)


def find_batch_norms(module: Module) -> set[str]:
    """Return a sentence if layers of BatchNorm train, which normalize a rank's own samples."""
    names = [name for name, part in module.named_modules() if isinstance(part, BatchNorm) and part.training]
    return {f"BatchNorm ({names[0]}) normalizes the samples of each rank"} if names else set()


def watch_hooks(recorder: Callback, trainer: Trainer, module: LightningModule, record: Callable[[str], None]) -> None:
    """Call `record` after each hook of a step that a callback or the module overrides, with the name of its place."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    owners: list[tuple[Any, type]] = [(each, Callback) for each in callbacks if each is not recorder]
    for owner, base in [*owners, (module, LightningModule)]:
        for name in _HOOKS:
            method = getattr(type(owner), name, None)
            if method is not None and method is not getattr(base, name, None):
                setattr(
                    owner, name, _recorded(getattr(owner, name), f"{name} of {_place(type(owner), method)}", record)
                )


def _recorded(hook: Callable[..., Any], place: str, record: Callable[[str], None]) -> Callable[..., Any]:
    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        record(place)
        return result

    return call


def _place(owner: type, method: Any) -> str:
    function = inspect.unwrap(method)
    return f"{owner.__name__} ({Path(function.__code__.co_filename).name}:{function.__code__.co_firstlineno})"
