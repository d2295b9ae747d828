"""Modules whose memory is planned and measured, and their data."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

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


class Drawn(Dataset[Any]):
    """Samples of a batch, drawn again for each index."""

    def __init__(self, draw: Callable[[torch.Generator], Any]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Any:
        return self._draw(torch.Generator().manual_seed(index))


def _text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 256, (65,), generator=generator)
    return drawn[:-1], drawn[1:]


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 1000, (64,), generator=generator)


def _image(generator: torch.Generator) -> tuple[Tensor, int]:
    return torch.randn(3, 32, 32, generator=generator), 0


def _transformer(name: str, head: str, intermediate_size: int, **options: int) -> LightningModule:
    import transformers

    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000}
    config = getattr(transformers, f"{name}Config")(**sizes, intermediate_size=intermediate_size, **options)
    return Language(getattr(transformers, name + head)(config))


MODELS: dict[str, tuple[Callable[[], LightningModule], Callable[[torch.Generator], Any]]] = {
    "gpt": (lambda: gpt(192, 4), _text),
    "llama": (lambda: _transformer("Llama", "ForCausalLM", 344), _tokens),
    "bert": (lambda: _transformer("Bert", "ForSequenceClassification", 512, num_labels=3), _tokens),
    "conv": (lambda: ConvNet(64), _image),
}
"""By name: a function that makes the module, and one that draws a sample."""
