"""Optimizers update shards as they update full parameters, also those of LightningCLI."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from tests.running import quiet_trainer


class Own(optim.SGD):
    """Mixes shards with full tensors and with numbers that depend on all of a parameter."""

    def step(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad / p.grad.abs().max() * group["lr"]).mul_(torch.full(p.shape, 0.99))
        return loss


class Shapes(LightningModule):
    """Matrices and vectors whose sizes no number of ranks divides, and a 0-dimensional parameter."""

    def __init__(self, optimizer: Callable[..., optim.Optimizer]) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.kinds: set[type] = set()
        self.hidden = nn.Linear(4, 5)
        self.out = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.out(torch.tanh(self.hidden(batch))) * self.scale
        return nn.functional.mse_loss(found, batch[:, :3].sin())

    def configure_optimizers(self) -> optim.Optimizer:
        optimizer = self.optimizer(self.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(self.note)
        optimizer.register_step_post_hook(self.note)
        return optimizer

    def note(self, optimizer: optim.Optimizer, *_: Any) -> None:
        """Note what hooks of the optimizer see of a matrix."""
        _, matrix, *_ = optimizer.param_groups[0]["params"]
        self.kinds |= {type(matrix), *(type(each) for each in optimizer.state[matrix].values() if each.dim())}


OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD, fused": partial(optim.SGD, fused=True, momentum=0.9),
    "Adagrad, fused": partial(optim.Adagrad, fused=True),
    "Rprop, foreach": partial(optim.Rprop, foreach=True),
    "a user's": Own,
}


def fit(num_ranks: int, strategy: str) -> list[Tensor]:
    found = []
    for optimizer in OPTIMIZERS.values():
        torch.manual_seed(0)
        module = Shapes(optimizer)
        data = DataLoader(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), 8 // num_ranks)  # type: ignore[arg-type]
        quiet_trainer(max_epochs=1, strategy=strategy, devices=num_ranks).fit(module, data)
        if strategy == "paral_fsdp":
            assert module.kinds == {DTensor}
        found.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    return found


def test_optimizers_update_shards_as_full_parameters(on_ranks) -> None:
    expected = fit(1, "auto")
    for found in on_ranks(2, fit, 2, "paral_fsdp"):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


class Hooked(Shapes):
    """Changes shards and arguments in step hooks, and has states that fit no parameter."""

    def configure_optimizers(self) -> optim.Optimizer:
        groups = [{"params": self.hidden.parameters()}, {"params": [*self.out.parameters(), self.scale]}]
        optimizer = optim.Adam(groups, lr=0.05, fused=True)
        optimizer.state["own"] = {"steps": torch.tensor(0)}  # type: ignore[index]
        self.handles = [
            register_optimizer_step_pre_hook(self.limit),
            optimizer.register_step_pre_hook(self.call_by_position),
            optimizer.register_step_post_hook(self.count),
            register_optimizer_step_post_hook(self.limit),
        ]
        return optimizer

    def on_after_backward(self) -> None:
        (0.1 * sum(p.pow(2).sum() + p.abs().mean() for p in self.parameters())).backward()  # type: ignore[union-attr]

    def limit(self, optimizer: optim.Optimizer, *_: Any) -> None:
        weight = optimizer.param_groups[0]["params"][0]
        weight.data.mul_(1 - 0.1 * weight.detach().norm())

    def call_by_position(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> Any:
        assert args == (optimizer,)
        return (optimizer, kwargs.pop("closure")), kwargs

    def count(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert len(args) == 2
        assert not kwargs
        optimizer.state["own"]["steps"] += 1  # type: ignore[index]

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.trainer.global_step == 3:
            optimizer.param_groups.pop()


def fit_hooked(num_ranks: int, strategy: str) -> list[Any]:
    torch.manual_seed(0)
    module = Hooked(optim.Adam)
    data = DataLoader(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), 8 // num_ranks)  # type: ignore[arg-type]
    trainer = quiet_trainer(max_epochs=1, strategy=strategy, devices=num_ranks)
    trainer.fit(module, data)
    for handle in module.handles:
        handle.remove()
    (optimizer,) = trainer.optimizers
    steps = optimizer.state["own"]["steps"]  # type: ignore[index]
    assert steps == 5
    assert "step" not in vars(optimizer), "the optimizer refers to the run"
    return [p.detach().clone() for p in module.parameters()]


def test_step_hooks_and_unknown_states_are_those_of_one_process(on_ranks) -> None:
    expected = fit_hooked(1, "auto")
    for found in on_ranks(2, fit_hooked, 2, "paral_fsdp"):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


class Manual(Shapes):
    """Steps on matrices by all of their elements, and on vectors with an optimizer of its own, beside penalties."""

    def __init__(self, optimizer: Callable[..., optim.Optimizer]) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]

            def closure(optimizer: Any = optimizer) -> Tensor:
                loss = Shapes.training_step(self, batch, batch_idx)
                weight = self.out.weight
                loss = loss + nn.functional.mse_loss(weight, torch.zeros_like(weight))
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss.detach()

            optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        matrices = [p for p in parameters if p.dim() == 2]
        return optim.Muon(matrices, lr=0.05), Scaled([p for p in parameters if p.dim() != 2], lr=0.05)


class Scaled(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                found = [p for p in group["params"] if p.grad is not None]
                longest = [p for p in found if p.dim()]
                torch._foreach_div_([p.grad for p in longest], torch._foreach_norm([p.grad for p in longest]))
                for p in found:
                    p.sub_(p.grad.sign() * p.detach().abs().max() * group["lr"] + torch.ones(p.shape) * 0.01)
        return loss


def fit_manually(num_ranks: int, strategy: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = Manual(optim.SGD)
    data = DataLoader(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), 8 // num_ranks)  # type: ignore[arg-type]
    quiet_trainer(max_epochs=1, strategy=strategy, devices=num_ranks).fit(module, data)
    return [p.detach().clone() for p in module.parameters()]


def test_optimizers_of_manual_optimization_step_as_in_hooks(on_ranks) -> None:
    expected = fit_manually(1, "auto")
    for found in on_ranks(2, fit_manually, 2, "paral_fsdp"):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


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
