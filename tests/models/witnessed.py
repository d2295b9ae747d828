"""A module that keeps which samples it has seen in each optimizer step, and a dataset of numbered samples."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

FEATURES = 6


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples that depend on their number only."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, number: int) -> tuple[int, Tensor, Tensor]:
        inputs = torch.randn(FEATURES, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        return number, inputs, inputs.sin().sum()


def numbered_loader(num_samples: int = 48, batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(Numbered(num_samples), batch_size=batch_size, shuffle=True)


class Witnessed(LightningModule):
    """Trains with Adam, and calls `saw(epoch, step, numbers, loss)` in each training step."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.hidden = nn.Linear(FEATURES, 8, dtype=torch.float64).to(dtype)
        self.out = nn.Linear(8, 1, dtype=torch.float64).to(dtype)
        self.seen: list[tuple[int, int, list[int], float]] = []

    def saw(self, epoch: int, step: int, numbers: list[int], loss: float) -> None:
        self.seen.append((epoch, step, numbers, loss))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, inputs, targets = (
            part.to(self.out.weight.dtype) if part.is_floating_point() else part for part in batch
        )
        outputs = self.out(torch.tanh(self.hidden(inputs))).squeeze(-1)
        loss = nn.functional.mse_loss(outputs, targets)
        self.saw(self.current_epoch, self.global_step, numbers.tolist(), loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)
