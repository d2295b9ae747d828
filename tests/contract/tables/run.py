"""The tools of a row on one rank: a Trainer with the strategy, small modules and data, and results to compare."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_paral.checkpoint.load import peek
from tests.contract.user_code.models import Loaders, Supervised, regression
from tests.running import quiet_trainer

SEED = 3
CHECKPOINT_KEYS = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "callbacks")
AVERAGING_KEYS = ("current_model_state", "averaging_state")


@dataclass
class Mean:
    """A value whose mean over the ranks is compared."""

    value: Any


@dataclass
class OfRankZero:
    """A value that is compared on rank 0 only, such as a file or printed text."""

    value: Any


@dataclass
class OfEach:
    """A value of which each rank may have its own, as `ddp` has buffers: compared with one process on every rank, and
    with `ddp` on rank 0, whose value is saved."""

    value: Any


class Losses(Callback):
    """Records the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self.losses.append(float(loss))


@dataclass
class Run:
    """One run of a cell on one rank."""

    strategy: Callable[[], Any]
    folder: Path
    """The same on all ranks."""
    num_devices: int
    ranks_per_sample: int = 1
    """The number of ranks that draw the same samples."""
    last: Trainer = field(init=False)
    """The Trainer of the last fit."""

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def num_ranks(self) -> int:
        """The number of ranks: one under DP."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def trainer(self, **options: Any) -> Trainer:
        """Return a quiet Trainer with the strategy of the cell, which trains for one epoch by default."""
        own = {"devices": self.num_devices, "strategy": self.strategy(), "default_root_dir": self.folder}
        return quiet_trainer(**({"max_epochs": 1} | own | options))

    def module(self, make: Callable[..., Any] = Supervised, *arguments: Any, **options: Any) -> Any:
        """Return a module with the same initial values in all cells."""
        torch.manual_seed(SEED)
        return make(*arguments, **options)

    def data(self, loaders: Loaders = regression) -> dict[str, Any]:
        """Return loaders for `fit` with this rank's samples of the global batches."""
        return loaders(self.rank // self.ranks_per_sample, max(1, self.num_ranks // self.ranks_per_sample))

    def of_all_ranks(self, values: list[Any]) -> list[Any]:
        """Return the concatenated lists of all ranks. *Collective*."""
        if not dist.is_initialized():
            return values
        lists: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(lists, values)
        return [value for each in lists for value in each]

    def fit(
        self,
        make: Callable[[], LightningModule] | LightningModule = Supervised,
        loaders: Loaders | None = regression,
        callbacks: Any = (),
        how: dict[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Fit, and return losses, weights and metrics.

        Args:
            make: the module, or a function that returns it.
            loaders: a function that returns the loaders; `None` if the module or `how` has them.
            callbacks: callbacks for the Trainer.
            how: further arguments of `fit`.
            options: further arguments of the Trainer.
        """
        module = make if isinstance(make, LightningModule) else self.module(make)
        losses = Losses()
        self.last = trainer = self.trainer(callbacks=[*callbacks, losses], **options)
        torch.manual_seed(SEED)
        trainer.fit(module, **({} if loaders is None else self.data(loaders)), **(how or {}))
        return {
            "losses": Mean(losses.losses),
            "weights": plain(dict(module.state_dict())),
            "metrics": Mean({name: float(value) for name, value in trainer.callback_metrics.items()}),
            "steps": (trainer.global_step, trainer.current_epoch),
            "seen": plain(getattr(module, "seen", [])),
        }

    def saved(self, path: Path | str) -> OfRankZero:
        """Return the contents of a full or sharded checkpoint on rank 0."""
        if self.rank:
            return OfRankZero(None)
        _, checkpoint = peek(path, weights_only=False)
        kept = {
            key: value
            for key, value in checkpoint.items()
            if key in CHECKPOINT_KEYS + AVERAGING_KEYS or key.startswith("user_")
        }
        for optimizer in kept.get("optimizer_states", []):
            for group in optimizer["param_groups"]:
                group.pop("param_names", None)  # our strategies add it
        return OfRankZero(_without_folder(plain(kept), str(self.folder)))


class Saving(Callback):
    """Saves at the end of training."""

    def __init__(self, run: Run, name: str) -> None:
        self.path = run.folder / name

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def _without_folder(values: Any, folder: str) -> Any:
    """Return nested containers with the path of a folder removed from all strings."""
    if isinstance(values, dict):
        return {_without_folder(key, folder): _without_folder(value, folder) for key, value in values.items()}
    if isinstance(values, list):
        return [_without_folder(value, folder) for value in values]
    return values.replace(folder, "") if isinstance(values, str) else values


def metrics_of(run: Run) -> OfRankZero:
    """Return the rows of CSVLogger's files, as numbers."""
    if run.rank:
        return OfRankZero(None)
    files = [path.read_text().splitlines() for path in sorted(run.folder.glob("**/metrics.csv"))]
    return OfRankZero([[[_number(cell) for cell in line.split(",")] for line in lines] for lines in files])


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def plain(values: Any) -> Any:
    """Return a copy of nested containers with full tensors on the CPU. *Collective* if tensors are sharded."""
    return tree_map_only(Tensor, _full, values)


def _full(value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone()
