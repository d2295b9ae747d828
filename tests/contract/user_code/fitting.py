"""Fit a row and keep all that can be compared."""

import logging
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_map_only

import lightning_paral
import tests.contract.user_code.themes  # noqa: F401  registers the rows
from lightning_paral.checkpoint.loading import look
from tests.contract.user_code.columns import COLUMNS
from tests.contract.user_code.rows import ROWS, Row
from tests.models import quiet_trainer

SEED = 3
HYPERPARAMETERS = ("lr", "weight_decay", "momentum", "betas")


@dataclass
class Fit:
    """What a fit left on one rank."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    hyperparameters: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    """On rank 0: `state_dict`, `optimizer_states`, `lr_schedulers`, and what hooks added."""
    buffers: tuple[str, ...] = ()


@dataclass
class Raised:
    """The error that ended a fit on one rank."""

    kind: str
    message: str
    is_ours: bool
    trace: str


class Keep(Callback):
    """Record the losses; at the end save and record what is gone after the run."""

    def __init__(self, fit: Fit, path: str) -> None:
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
        self.fit.metrics |= {key: float(value) for key, value in trainer.callback_metrics.items()}
        for optimizer in trainer.optimizers:
            groups = optimizer.param_groups
            self.fit.hyperparameters.append([{k: g[k] for k in HYPERPARAMETERS if k in g} for g in groups])


def fit(label: str, strategy: Any, folder: str, num_devices: int) -> Fit:
    """Fit the row; in a process of a world, or in one."""
    row = ROWS[label]
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    kept = Fit()
    _quiet()
    parts = 2 if row.resumed and num_devices > 1 else 1
    path: str | None = None
    for part in range(parts):
        torch.manual_seed(SEED)
        module = row.module()
        saved, path = path, str(Path(folder, f"part-{part}.ckpt"))
        keep = Keep(kept, path)
        options: dict[str, Any] = {"max_epochs": 2 if row.resumed else 1} | row.trainer
        if parts == 2 and part == 0:
            options["max_epochs"] = 1
        trainer = quiet_trainer(
            devices=num_devices,
            strategy=strategy(),
            callbacks=[*row.callbacks(), keep],
            default_root_dir=folder,
            **options,
        )
        torch.manual_seed(SEED)
        trainer.fit(module, ckpt_path=saved, **row.loaders(rank, num_ranks))
        kept.seen += getattr(module, "seen", [])
    kept.weights = {name: _copy(value) for name, value in module.state_dict().items()}
    kept.buffers = tuple(name for name, _ in module.named_buffers())
    if rank == 0:
        kept.checkpoint = _contents(path)
    kept.seen = tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), kept.seen)
    return kept


def attempt(label: str, column: str, folder: str) -> Fit | Raised:
    """Fit the row in a column, on this rank; return the error if there is one."""
    try:
        return fit(label, reference(column), folder, 2)
    except Exception as error:
        import traceback

        is_ours = isinstance(error, lightning_paral.errors.ParalError)
        found = Raised(type(error).__name__, str(error), is_ours, traceback.format_exc())
        # For the case that another rank waits for this one forever.
        Path(folder, f"raised-{os.environ.get('RANK', '0')}.txt").write_text(f"{found.kind}: {found.message}")
        return found


def reference(column: str) -> Any:
    """Return what makes the strategy of a column, or of a reference."""
    return COLUMNS[column].strategy if column in COLUMNS else lambda: column


def _contents(path: str) -> dict[str, Any]:
    _, checkpoint = look(path, weights_only=False)
    kept = {
        key: value
        for key, value in checkpoint.items()
        if key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch") or key.startswith("user_")
    }
    for optimizer in kept.get("optimizer_states", []):
        for group in optimizer["param_groups"]:
            group.pop("param_names", None)  # ours have it beside what torch writes
    return tree_map_only(Tensor, _copy, kept)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return value


def _quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


__all__ = ["Fit", "Raised", "Row", "attempt", "fit", "reference"]
