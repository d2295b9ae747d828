"""A module that builds its layers in `configure_model`."""

import torch
from torch import Tensor, nn

from tests.models.blocks import WIDTH, Block, next_token_loss
from tests.models.tokens import VOCABULARY, Fitted


class BuiltLate(Fitted):
    """Sets initial values in all the ways that people use in `configure_model`."""

    def configure_model(self) -> None:
        if hasattr(self, "embedding"):
            return
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for rate, block in zip(torch.linspace(0, 1, 3), self.blocks, strict=True):
            block.rate = rate.item()
            nn.init.orthogonal_(block.up.weight)
            nn.init.trunc_normal_(block.down.weight, std=0.2)
            block.up.bias.data.fill_(0.1)
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(2.0)
            self.blocks[2].down.weight[1:3] = 0.5
            self.blocks[2].up.weight.copy_(self.blocks[1].up.weight * 0.5)
        self.blocks.apply(self.shift)
        scale = torch.ones(WIDTH)
        scale[::2] = torch.rand(WIDTH // 2)
        self.register_buffer("scale", scale, persistent=False)
        self.gain = nn.Parameter(torch.tensor(1.5))

    @staticmethod
    def shift(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.data.add_(0.05 * torch.rand(1).item())

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.embedding(batch[0])
        for block in self.blocks:
            x = block(x) * (1 + block.rate)
        return next_token_loss(self.gain * self.head(self.scale * x), batch[0])
