"""Modules whose layers are planned."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_paral.engines.tensor.plan import TensorPlan
from lightning_paral.engines.tensor.planner.following import observe
from lightning_paral.engines.tensor.planner.make import make_plan
from lightning_paral.engines.tensor.planner.observations import Observations
from lightning_paral.planning.fake import StepSettings


class Step(LightningModule):
    """Two linear layers, `up` and `down`, with code of a subclass in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.kept: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        return self.down(functional.gelu(self.up(x)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Block(nn.Module):
    """A feed-forward network with a norm."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.relu(self.up(self.norm(x))))


class Classifier(LightningModule):
    """Embeds tokens and predicts classes; the weight of the head is that of the embedding if `is_tied`."""

    def __init__(self, num_classes: int = 301, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(64, num_classes, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch).flatten(0, 1).float(), batch.flatten())


INPUTS = torch.zeros(2, 3, 8)
TOKENS = torch.zeros(2, 6, dtype=torch.long)


def observed(module: LightningModule, batch: Any = INPUTS, **options: Any) -> Observations:
    return observe(module, batch, StepSettings(), **options)


def planned(module: LightningModule, batch: Any = TOKENS, num_ranks: int = 2, plan: Any = "auto") -> TensorPlan:
    return make_plan(module, num_ranks, observed(module, batch), plan)


def written(plan: TensorPlan) -> dict[str, str]:
    """Return each layer that is split, with its style; `"colwise*"` and `"rowwise*"` leave out collectives."""
    return {
        name: split.style + "*" * (not (split.gathers_output and split.splits_input))
        for name, split in plan.splits.items()
    }
