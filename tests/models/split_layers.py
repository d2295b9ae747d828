"""A module with layers that can be split over two or four ranks."""

import torch
from torch import Tensor, nn

from tests.models.chain import FEATURES, Regression

WIDTH = 8
PLAN = {
    "blocks.*.up": "colwise",
    "blocks.*.gate": "colwise",
    "blocks.*.down": "rowwise",
    "twice": "colwise",
    "alone": "rowwise",
    "out": "vocab",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.fill_(1.0)
        inner = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(inner)) * self.up(inner))


class SplitLayers(Regression):
    """Gated blocks, one of them frozen, and layers that are split alone, used twice, 0-dimensional, or never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.alone = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.out = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        for block in self.blocks:
            x = block(x) + self.shift
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.out(self.alone(x)) * self.scale
