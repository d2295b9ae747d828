"""Modules and fits whose ranks differ in one way."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.contract.cases import strategy_of
from tests.running import quiet_trainer


class Differing(LightningModule):
    """A module that differs on rank 1 in the way that `kind` names."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self.kind = kind if rank == 1 else ""
        self.body = nn.Linear(4, 10)
        self.head = nn.Linear(10, 12 if self.kind == "shape" else 8, bias=self.kind != "missing")
        if self.kind == "dtype":
            self.head.bias.data = self.head.bias.data.double()
        if self.kind == "frozen":
            self.head.bias.requires_grad_(False)
        self.register_buffer("table", torch.zeros(5 if self.kind == "buffer" else 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.body(batch)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.head(self.body(batch))

    def configure_optimizers(self) -> Any:
        if self.kind == "no scheduler":
            return torch.optim.AdamW(self.parameters(), lr=0.1)
        if self.kind == "groups":
            groups = [{"params": self.body.parameters()}, {"params": self.head.parameters()}]
            return [torch.optim.AdamW(groups, lr=0.1)], []
        if self.kind == "class":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        weight_decay = 0.5 if self.kind == "weight_decay" else 0.01
        return torch.optim.AdamW(self.parameters(), lr=0.2 if self.kind == "lr" else 0.1, weight_decay=weight_decay)


def error_of(run: Any) -> str:
    """Return the message of the error that `run` raises, or "" if it raises none."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def loader(num_batches: int = 4) -> DataLoader[Tensor]:
    return DataLoader(torch.ones(4 * num_batches, 4), batch_size=2)


def fit(strategy: str, module: LightningModule, options: dict[str, Any], **of_trainer: Any) -> str:
    """Fit `module` on all ranks, and return the message of the error."""
    defaults: dict[str, Any] = {"devices": 2, "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(strategy=strategy_of(strategy, **options), **(defaults | of_trainer))
    return error_of(lambda: trainer.fit(module, loader()))


class BuiltDifferently(Differing):
    """Rank 1 builds something else than rank 0 in `configure_model`."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__("", rank)
        self.built = kind if rank == 1 else ""
        del self.body, self.head

    def configure_model(self) -> None:
        if hasattr(self, "body"):
            return
        self.body = nn.Linear(4, 10)
        if self.built != "fewer":
            self.head = nn.Linear(10, 12 if self.built == "size" else 8)
        if self.built == "more":
            self.extra = nn.Linear(2, 2)
