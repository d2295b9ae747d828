"""FSDP broadcasts the values of a unit before sharding it, and units compute in the right precision."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paral import ParalFSDPStrategy
from tests.running import quiet_trainer


class Normalizing(LightningModule):
    """Normalizes fp32 and bf16 inputs by statistics of the sample and by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.InstanceNorm1d(4, affine=True)
        self.widen = nn.Conv1d(4, 6, 1)
        self.tracking = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
        self.last = nn.Linear(6 * 8, 2)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.tracking(self.widen(self.first(batch))))
        loss = (self.last(hidden.flatten(1)).float() - batch.mean(dim=(1, 2), keepdim=True)[:, 0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_normalizing(strategy: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Normalizing()
    data = torch.randn(16, 4, 8, generator=torch.Generator().manual_seed(1)) * 3 + 1
    trainer = quiet_trainer(strategy=strategy, devices=1, max_epochs=1, precision="bf16-mixed")
    trainer.fit(model, DataLoader(data, 4))
    return model.losses, model.state_dict()


def fit_sharded(units: Any) -> tuple[list[float], dict[str, Tensor]]:
    return fit_normalizing(ParalFSDPStrategy(units=units))


@pytest.mark.parametrize("units", ["auto", ["InstanceNorm1d", "Conv1d"]])
def test_instance_norm_under_mixed_precision_computes_as_in_one_process(on_ranks, units: Any) -> None:
    losses, weights = fit_normalizing("auto")

    ((found, state),) = on_ranks(1, fit_sharded, units)

    torch.testing.assert_close(found, losses, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(state, weights, rtol=1e-6, atol=1e-7)
