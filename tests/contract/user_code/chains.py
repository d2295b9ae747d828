"""Rows about the order in which a step calls repeated blocks, and about what it takes from inside them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.contract.user_code.models import Block, Supervised
from tests.contract.user_code.rows import add, row

Run = Callable[[Any, Tensor], Tensor]


def through(blocks: Iterable[Any], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class Chain(Supervised):
    """Four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.blocks.extend(Block() for _ in range(2))

    def run(self, blocks: Any, x: Tensor) -> Tensor:
        return through(blocks, x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self.backbone.blocks, self.backbone.stem(x))
        return self.head(x * self.backbone.gain / self.backbone.temperature)


def add_chain(label: str, sentence: str, run: Run) -> None:
    module = type("Chained", (Chain,), {"run": lambda self, blocks, x: run(blocks, x)})
    add(f"blocks, {label}", sentence, module, names=r"blocks\.\d")


def without_gradients_of_first(blocks: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = blocks[0](x)
    return through(blocks[1:], x)


def past_next(blocks: Any, x: Tensor) -> Tensor:
    first = blocks[0](x)
    return through(blocks[2:], blocks[1](first) + first)


def skip(blocks: Any, x: Tensor) -> Tensor:
    first = blocks[0](x)
    return through(blocks[1:], first) + first


add_chain("the first left out", "A step that does not call the first block.", lambda b, x: through(b[1:], x))
add_chain("the first under no_grad", "The first block computes under no_grad.", without_gradients_of_first)
add_chain("an output used at the end", "The first block's output is added to the last one's (U-Net).", skip)
add_chain("an output used past the next", "The third block gets the sum of the two outputs before it.", past_next)


@row("blocks, a tensor kept inside", names="from inside")
class KeptInside(Chain):
    """block.kept = output in a forward hook of every block, and self.blocks[-1].kept in the loss."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.backbone.blocks:
            block.register_forward_hook(self.keep)

    def keep(self, block: Any, inputs: Any, output: Tensor) -> Tensor:
        block.kept = output * 0.1
        return output

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.backbone.blocks[-1].kept.sum(dim=1, keepdim=True)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.tanh(self.layer(x))
        sums += scale.sum(1)
        return x * scale.exp(), sums


@row("blocks, an input changed inside", names=r"flows\.0")
class Flows(Supervised):
    """sums += ... of an input tensor inside of a block, which returns it (normalizing flows)."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Flow() for _ in range(2))

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        sums = torch.zeros(len(x))
        for flow in self.flows:
            x, sums = flow(x, sums)
        return super().loss(batch) + (x.square().sum(1) - sums).mean()


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.clone().requires_grad_()
            (force,) = torch.autograd.grad(torch.tanh(self.layer(x)).sum(), x, create_graph=True)
        return x - 0.1 * force


@row("blocks that follow a gradient", names="autograd.grad")
class Energies(Chain):
    """torch.autograd.grad of an energy by the block's own input, inside of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.blocks = nn.ModuleList(Energy() for _ in range(4))


@row("loss, a sum over samples", reference="ddp", names="is not a mean over samples")
class Sums(Supervised):
    """loss * len(batch): a sum over samples, which is not a mean of the ranks' sums."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0])


@row("loss, a sum over samples, with dropout", reference="ddp", names="is not a mean over samples", apart=(".",))
class DroppedSums(Sums):
    """nn.Dropout in the blocks, and loss * len(batch)."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.backbone.blocks:
            block.layer = nn.Sequential(block.layer, nn.Dropout(0.5))
