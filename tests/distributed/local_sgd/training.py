"""Fits in float64 whose weights can be compared, under local SGD and under DDP."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_paral import ParalDDPStrategy, ParalLocalSGDStrategy
from tests.models.regression import Regression
from tests.running import quiet_trainer

Weights = dict[str, Tensor]
OPTIMIZERS: dict[str, Any] = {
    "plain": {"lr": 0.05},
    "momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}
"""Those that are linear in the gradients."""


class Model(Regression):
    """A network, or with `is_linear` one layer, whose loss is quadratic; `optimizer` is of `OPTIMIZERS`, or "adamw"."""

    def __init__(self, optimizer: str = "plain", *, is_linear: bool = False) -> None:
        super().__init__()
        self.norm = nn.Identity() if is_linear else nn.BatchNorm1d(32)
        self.optimizer, self.is_linear = optimizer, is_linear
        self.out.requires_grad_(not is_linear)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)[:, :2] if self.is_linear else self.out(torch.tanh(self.norm(self.hidden(x))))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.02)
        return torch.optim.SGD(self.parameters(), **OPTIMIZERS[self.optimizer])


def samples(num_steps: int, *, same_features: bool = False, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    """Return batches of 4; with `same_features`, all ranks draw the same inputs in a step, and other targets."""
    ranks, generator = dist.get_world_size() if dist.is_initialized() else 1, torch.Generator().manual_seed(5)
    inputs = torch.randn(num_steps, ranks, 4, 8, generator=generator, dtype=dtype)
    inputs = (inputs[:, :1].expand_as(inputs) if same_features else inputs).reshape(-1, 8)
    targets = torch.randn(len(inputs), 2, generator=generator, dtype=dtype) + inputs[:, :2]
    return DataLoader(TensorDataset(inputs, targets), 4)


def weights_of(module: Any) -> Weights:
    return {name: value.detach().clone() for name, value in module.state_dict().items() if value.is_floating_point()}


def fit(
    strategy: Any,
    optimizer: str = "plain",
    *callbacks: Callback,
    steps: int = 6,
    is_linear: bool = False,
    **options: Any,
) -> Weights:
    """Train, and return the weights of this rank."""
    torch.manual_seed(3 + dist.get_rank())  # ranks begin with other weights, which the strategy makes equal
    module, same_features = Model(optimizer, is_linear=is_linear), options.pop("same_features", False)
    resume_from = options.pop("resume_from", None)
    ranks = dist.get_world_size()
    given = {"max_epochs": 1, "devices": ranks, "callbacks": [*callbacks], "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(strategy=strategy, **given)
    data = samples(steps, same_features=same_features)
    trainer.fit(module, data, samples(2), ckpt_path=resume_from)
    return weights_of(module)


def local(**options: Any) -> ParalLocalSGDStrategy:
    return ParalLocalSGDStrategy(**({"period": 1} | options))


def ddp() -> ParalDDPStrategy:
    return ParalDDPStrategy()


def distance(first: Weights, second: Weights) -> float:
    """Return the largest difference, relative to the largest weight."""
    assert first.keys() == second.keys()
    largest = max(value.abs().max().item() for value in second.values())
    return max((first[name] - second[name]).abs().max().item() for name in first) / largest
