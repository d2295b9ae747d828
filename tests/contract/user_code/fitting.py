"""Fit a row and keep all results to compare."""

import gc
import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import lightning_paral
import tests.contract.user_code.themes  # noqa: F401  registers the rows
from lightning_paral.checkpoint.load import peek
from tests.contract.user_code.columns import RUNNABLE
from tests.contract.user_code.rows import ROWS, Row
from tests.running import quiet_trainer

SEED = 3
HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "betas")


@dataclass
class Fit:
    """The results of a fit on one rank."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    hyperparameters: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    seen_by_rank: list[list[Any]] = field(default_factory=list)
    """For a reference with several ranks, the `seen` of each."""
    checkpoint: dict[str, Any] = field(default_factory=dict)
    """On rank 0: `state_dict`, `optimizer_states`, `lr_schedulers`, and entries added by hooks."""
    buffers: tuple[str, ...] = ()


@dataclass
class Raised:
    """The error that ended a fit on one rank."""

    kind: str
    message: str
    is_ours: bool
    trace: str


class Keep(Callback):
    """Record the losses; at the end save a checkpoint and record values that are gone after the run."""

    def __init__(self, fit: Fit, path: Path) -> None:
        self.fit = fit
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self.fit.losses.append(float(loss))

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)
        self.fit.hyperparameters = []  # of an interrupted run, keep those of the second part
        self.fit.metrics |= {key: float(value) for key, value in trainer.callback_metrics.items()}
        for optimizer in trainer.optimizers:
            groups = optimizer.param_groups
            self.fit.hyperparameters.append([{k: g[k] for k in HYPERPARAMETERS if k in g} for g in groups])


def fit(label: str, strategy: Callable[[], Any], folder: str, num_devices: int, ranks_per_sample: int = 1) -> Fit:
    """Fit the row on this rank, or in one process.

    Args:
        label: the label of the row.
        strategy: a function that returns the strategy for the Trainer.
        folder: the folder for checkpoints, the same on all ranks.
        num_devices: `Trainer(devices=...)`. With one device the run is not interrupted.
        ranks_per_sample: the number of ranks that draw the same samples.
    """
    row = ROWS[label]
    epochs = row.trainer.get("max_epochs", 2 if row.resumed else 1)
    kept = Fit()
    fit_part = partial(_fit_part, row, kept, ranks_per_sample)
    with _quiet():
        if row.resumed and num_devices > 1:
            fit_part(strategy(), Path(folder, "middle"), num_devices, epochs - 1, None)
            fit_part(strategy(), Path(folder, "end"), num_devices, epochs, Path(folder, "middle"))
        else:
            fit_part(strategy(), Path(folder, "end"), num_devices, epochs, None)
        if _rank() == 0:
            kept.checkpoint = _contents(Path(folder, "end"))
    return kept


def _fit_part(
    row: Row,
    kept: Fit,
    ranks_per_sample: int,
    strategy: Any,
    path: Path,
    num_devices: int,
    max_epochs: int,
    ckpt_path: Path | None,
) -> None:
    torch.manual_seed(SEED)
    module = row.module()
    own = {"devices": num_devices, "strategy": strategy, "default_root_dir": path.parent, "max_epochs": max_epochs}
    trainer = quiet_trainer(**(row.trainer | own), callbacks=[*row.callbacks(), Keep(kept, path)])
    torch.manual_seed(SEED)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    data_rank, num_data_ranks = _rank() // ranks_per_sample, max(1, num_ranks // ranks_per_sample)
    # Rows save objects of any type in checkpoints.
    trainer.fit(module, ckpt_path=ckpt_path, weights_only=False, **row.loaders(data_rank, num_data_ranks))
    kept.seen += tree_map_only(Tensor, _copy, getattr(module, "seen", []))
    kept.weights = {name: _copy(value) for name, value in module.state_dict().items()}
    kept.buffers = tuple(name for name, _ in module.named_buffers())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def attempt(label: str, column: str, folder: str) -> Fit | Raised:
    """Fit the row in a column on this rank; return the results, or the error."""
    try:
        _collect_quickly(column)
        return fit(
            label, strategy_of(column), folder, 2, RUNNABLE[column].ranks_per_sample if column in RUNNABLE else 1
        )
    except Exception as error:
        is_ours = isinstance(error, lightning_paral.errors.ParalError)
        found = Raised(type(error).__name__, str(error), is_ours, traceback.format_exc())
        # Another rank may wait for this one until the pool ends it, so the error is also written to a file.
        Path(folder, f"raised-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(asdict(found)))
        if ROWS[label].of_one_rank:
            raise  # the pool ends the other ranks
        return found


def strategy_of(column: str) -> Any:
    """Return a function that returns the strategy of a column or of a reference."""
    return RUNNABLE[column].strategy if column in RUNNABLE else lambda: column


_collected: set[str] = set()


def _collect_quickly(column: str) -> None:
    """Exclude all objects created so far from garbage collections, which DeepSpeed runs in every fit."""
    if column not in _collected:
        _collected.add(column)
        gc.collect()
        gc.freeze()


def _contents(path: Path) -> dict[str, Any]:
    _, checkpoint = peek(path, weights_only=False)
    kept = {
        key: value
        for key, value in checkpoint.items()
        if key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch") or key.startswith("user_")
    }
    for optimizer in kept.get("optimizer_states", []):
        for group in optimizer["param_groups"]:
            group.pop("param_names", None)  # our strategies add it
    return tree_map_only(Tensor, _copy, kept)


def _copy(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()  # tensors that the user kept are sharded like the parameters
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return value


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning_paral")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
