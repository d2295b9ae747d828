"""Modules whose plans are compared with measurements."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from examples.gpt import GPT


class ConvNet(LightningModule):
    """Convolutions with BatchNorm, for 3 x 32 x 32 images."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(2):
            layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class DependsOnValues(ConvNet):
    """Selects pixels by their values, so the shapes are not known in advance."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, _ = batch
        return super().training_step(batch, batch_idx) + images[images > 0].mean()


class Adversarial(LightningModule):
    """Two optimizers, used in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch: Tensor) -> None:
        first, second = self.optimizers()
        for optimizer, parameters in ((first, self.generator), (second, self.critic)):
            self.toggle_optimizer(optimizer)
            loss = self.critic(self.generator(batch)).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            assert parameters is not None

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.9)
        return sgd, torch.optim.Adam(self.critic.parameters())


class Language(LightningModule):
    """A model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if type(self.model).__name__.startswith("Bert"):
            return self.model(input_ids=batch, labels=batch[:, 0] % 3).loss
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def images(size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 32, 32), torch.zeros(size, dtype=torch.long)


def bytes_of_text(size: int = 8, length: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (size, length)), torch.randint(0, 256, (size, length))


def gpt(width: int = 64, num_layers: int = 4) -> GPT:
    return GPT(width=width, num_layers=num_layers, context=64)
