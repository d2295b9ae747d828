"""A module with modules among its hyper-parameters."""

from argparse import Namespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.running import SaveAt, quiet_trainer


def users_hook(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    net[0].register_forward_hook(users_hook)
    return net


class Given(LightningModule):
    def __init__(self, net: nn.Module, loss: nn.Module, more: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.loss = net, loss

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        result: Tensor = self.loss(self.net(batch), batch[:, :3])
        return result

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def make_given() -> Given:
    net = make_net()
    return Given(net, nn.MSELoss(), {"parts": [net[3], Namespace(head=net[0])], "beside": nn.Linear(2, 2)})


def fit(strategy: Any, path: str, num_ranks: int, module: LightningModule | None = None) -> LightningModule:
    """Train on one batch and save to `path`."""
    module = make_given() if module is None else module
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))
    trainer = quiet_trainer(strategy=strategy, devices=num_ranks, max_steps=1, callbacks=[SaveAt(1, path)])
    trainer.fit(module, DataLoader(data, 8 // num_ranks))
    return module
