"""A module that imports transformers late, in `configure_model`."""

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.contract.cases import strategy_of
from tests.running import quiet_trainer


class ImportsLate(LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.imported_before = "transformers.modeling_utils" in sys.modules

    def configure_model(self) -> None:
        from transformers import AutoModelForSequenceClassification

        torch.manual_seed(5)
        self.model = AutoModelForSequenceClassification.from_pretrained(self.folder)
        self.head = nn.Linear(2, 2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        self.values = {name: strategy.full_parameter(p).cpu() for name, p in self.named_parameters()}
        self.values |= {name: buffer.cpu() for name, buffer in self.named_buffers()}


def load_late(label: str, folder: str) -> tuple[bool, dict[str, Tensor]]:
    """Return whether transformers was imported before, and the full parameters and buffers by name.

    *Collective* over the default group.
    """
    module = ImportsLate(folder)
    trainer = quiet_trainer(strategy=strategy_of(label), devices=2, limit_val_batches=1)
    trainer.validate(module, DataLoader(torch.ones(4, 2), batch_size=2), verbose=False)
    return module.imported_before, module.values
