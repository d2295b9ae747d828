"""Validation during a fit uses the same buffers on all ranks: those of rank 0, which checkpoints contain."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.contract.cases import BY_LABEL, CASES
from tests.running import quiet_trainer

FEATURES = 6


class Normalized(LightningModule):
    """A regression with BatchNorm, whose running statistics differ between ranks unless they are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(num_samples: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of samples whose scale grows, so that no two batches have the same statistics."""
    inputs = torch.randn(num_samples, FEATURES, generator=torch.Generator().manual_seed(seed))
    inputs *= torch.linspace(0.5, 2.0, num_samples).unsqueeze(1)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4)


def fit_and_validate(label: str, num_ranks: int, **options: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the last validation loss of a fit, and the final weights and buffers."""
    torch.manual_seed(5)
    model = Normalized()
    strategy = BY_LABEL[label].strategy()
    trainer = quiet_trainer(strategy=strategy, max_epochs=2, num_sanity_val_steps=0, **{"devices": num_ranks} | options)
    trainer.fit(model, loader(32, seed=1), loader(24, seed=2))
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    return float(trainer.callback_metrics["val_loss"]), state


def validate_in_one_process(state: dict[str, Tensor]) -> float:
    model = Normalized()
    model.load_state_dict(state)
    (metrics,) = quiet_trainer(devices=1, strategy="auto").validate(model, loader(24, seed=2), verbose=False)
    return metrics["val_loss"]


@pytest.mark.parametrize(
    ("label", "num_ranks"),
    [(case.label, max(case.world_sizes[:2])) for case in CASES if case.has_ranks],
)
def test_validation_in_a_fit_equals_one_process_with_the_final_weights_and_buffers(
    on_ranks, label: str, num_ranks: int
) -> None:
    ranks = on_ranks(num_ranks, fit_and_validate, label, num_ranks)

    _, expected = ranks[0]
    for loss, state in ranks:
        assert loss == pytest.approx(validate_in_one_process(state), rel=1e-5)
        torch.testing.assert_close(state, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("label", [case.label for case in CASES if case.devices_per_process])
def test_validation_on_several_devices_equals_one_process_with_the_final_weights_and_buffers(label: str) -> None:
    loss, state = fit_and_validate(label, num_ranks=1, devices=2)

    assert loss == pytest.approx(validate_in_one_process(state), rel=1e-5)
