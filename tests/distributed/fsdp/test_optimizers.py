"""Optimizers that cannot update shards are refused by name, and those of LightningCLI train."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from lightning_paral.errors import ConfigurationError
from tests.running import quiet_trainer


class Flattening(optim.SGD):
    """Uses an operation that DTensors do not support."""

    def step(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(torch.ones(5, 4))
        return loss


class Shapes(LightningModule):
    """Matrices and vectors whose sizes no number of ranks divides, and a 0-dimensional parameter; or matrices only."""

    def __init__(self, optimizer: Callable[..., optim.Optimizer], matrices: bool) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.hidden = nn.Linear(4, 5)
        self.out = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))
        for parameter in self.parameters():
            parameter.requires_grad_(not matrices or parameter.dim() == 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.out(torch.tanh(self.hidden(batch))) * self.scale
        return nn.functional.mse_loss(found, batch[:, :3].sin())

    def configure_optimizers(self) -> optim.Optimizer:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(optimizer: Callable[..., optim.Optimizer], matrices: bool, **options: Any) -> Tensor | str:
    torch.manual_seed(0)
    module = Shapes(optimizer, matrices)
    data = DataLoader(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), 8)  # type: ignore[arg-type]
    try:
        quiet_trainer(max_epochs=1, **options).fit(module, data)
    except ConfigurationError as error:
        return str(error)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


REFUSED: dict[str, tuple[Any, bool, list[str]]] = {
    "SGD, fused": (partial(optim.SGD, fused=True), True, ["SGD(fused=True)", "SGD(fused=False)"]),
    "Adagrad, fused": (partial(optim.Adagrad, fused=True), True, ["Adagrad(fused=True)"]),
    "Rprop, foreach": (partial(optim.Rprop, foreach=True), True, ["Rprop(foreach=True)"]),
    "a user's": (Flattening, False, ["Flattening", "`step`", "paral_ddp"]),
}


def refusals() -> dict[str, Tensor | str]:
    return {name: fit(*case[:2], strategy="paral_fsdp", devices=2) for name, case in REFUSED.items()}


def test_optimizers_that_cannot_update_shards_are_named(on_ranks) -> None:
    for results in on_ranks(2, refusals):
        for name, said in results.items():
            for part in REFUSED[name][2]:
                assert part in said, (name, said)


class Two(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch).squeeze(1) - batch.sum(1)).pow(2).mean()


class Rows(LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), self.batch_size)  # type: ignore[arg-type]


class WithOptimizer(LightningCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_optimizer_args((optim.AdamW, optim.Adagrad))
        parser.add_lr_scheduler_args(optim.lr_scheduler.ExponentialLR)


def fit_by_cli(strategy: str, devices: int, batch_size: int, optimizer: str = "AdamW") -> Tensor:
    """Fit with an optimizer that LightningCLI creates together with the module, before it is sharded."""
    made = {"class_path": f"torch.optim.{optimizer}", "init_args": {"lr": 0.05}}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = {**quiet, "strategy": strategy, "devices": devices, "max_epochs": 2}
    args: Any = {
        "trainer": trainer,
        "data": {"batch_size": batch_size},
        "optimizer": made,
        "lr_scheduler": {"gamma": 0.5},
    }
    cli = WithOptimizer(
        Two, Rows, args={"fit": args, "subcommand": "fit"}, seed_everything_default=3, save_config_callback=None
    )
    return torch.cat([p.detach().flatten() for p in cli.model.parameters()])


@pytest.mark.parametrize(("strategy", "batch_size"), [("paral_fsdp", 4), ("paral_fsdp_offload", 4), ("paral_tp", 8)])
def test_optimizer_of_the_command_line_trains_as_in_one_process(on_ranks, strategy: str, batch_size: int) -> None:
    expected = fit_by_cli("auto", 1, 8)
    for found in on_ranks(2, fit_by_cli, strategy, 2, batch_size):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
