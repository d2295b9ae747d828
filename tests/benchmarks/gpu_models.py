"""The GPT of the GPU benchmark in common sizes, and random tokens generated on the device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from examples.gpt import Block
from lightning_paral import ActivationCheckpointing


@dataclass(frozen=True)
class Size:
    """The shape of a GPT and of its training batches."""

    name: str
    width: int
    num_layers: int
    num_heads: int
    vocabulary: int
    context: int
    batch_size: int
    recompute: bool = False
    """Whether to use activation checkpointing: keep only the inputs of blocks for the backward pass."""

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters."""
        block = 12 * self.width**2 + 10 * self.width
        return self.num_layers * block + (self.vocabulary + self.context + 2) * self.width

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens per step."""
        return self.batch_size * self.context

    @property
    def flops_per_token(self) -> float:
        """Return the floating-point operations of forward and backward per token, without recomputation.

        Six per parameter, plus attention, as in Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B.
        """
        return 6 * self.num_parameters + 12 * self.num_layers * self.width * self.context

    @property
    def checkpointing(self) -> ActivationCheckpointing | None:
        """Return the `activation_checkpointing` of strategies, if this size recomputes."""
        return ActivationCheckpointing(units=["Block"]) if self.recompute else None


SIZES = {
    size.name: size
    for size in (
        Size("tiny", 32, 2, 2, 256, 32, 2),
        Size("124M", 768, 12, 12, 50304, 1024, 16),
        Size("1.3B", 2048, 24, 16, 50304, 1024, 16, recompute=True),
    )
}


class Network(nn.Module):
    """The example's blocks between an embedding and a head that share their weight."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.num_heads) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting every token except the first."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Measured(LightningModule):
    """Builds the network in `configure_model`, and trains it with AdamW."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size

    def configure_model(self) -> None:
        if not hasattr(self, "network"):
            self.network = Network(self.size)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters())


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return fused AdamW: other implementations copy all parameters in a step."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)


class Tokens(IterableDataset[Tensor]):
    """Batches of random tokens, generated on the device on demand."""

    def __init__(self, size: Size, num_steps: int, device: torch.device) -> None:
        self.size, self.num_steps, self.device = size, num_steps, device

    def __iter__(self) -> Iterator[Tensor]:
        shape = (self.size.batch_size, self.size.context + 1)
        generator = torch.Generator(self.device).manual_seed(0)
        for _ in range(self.num_steps):
            yield torch.randint(self.size.vocabulary, shape, generator=generator, device=self.device)
