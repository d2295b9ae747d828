"""One linear layer, for tests of what is around the module."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Linear(LightningModule):
    """Trains `layer` with SGD."""

    def __init__(self, features: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.layer = nn.Linear(features, features)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def ones(num_samples: int = 16, batch_size: int = 4, features: int = 4) -> DataLoader[Tensor]:
    return DataLoader(torch.ones(num_samples, features), batch_size=batch_size)  # type: ignore[arg-type]
