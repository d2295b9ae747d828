"""Gradients that code reads or computes itself in a pipeline equal those of one process, or are refused."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ConfigurationError, ParalPipelineStrategy, RankFailedError
from lightning_paral.engines.pipeline.derivatives import THROUGH_STAGES
from tests.models.chain import FEATURES, WIDTH, Block, Chain, fit_chain


class Derives(Chain):
    """Adds a term to the loss that depends on a gradient."""

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        x = inputs.clone().requires_grad_()
        outputs = self(x)
        loss = nn.functional.mse_loss(outputs, targets)
        return loss + 0.1 * self.of_loss(x, outputs, loss)


class ByInputs(Derives):
    """A gradient penalty. The inputs also reach the outputs past the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tanh(self.skip(x))

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        (slopes,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return slopes.square().mean()


class ByInputsOfFirst(ByInputs):
    """The first stage alone has the embedding through which the inputs reach the chain."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden) + torch.tanh(self.skip(x))


@dataclass
class Graph:
    nodes: Tensor
    positions: Tensor


class GraphBlock(Block):
    def forward(self, x: Any, shift: Tensor | None = None) -> Tensor:
        graph = x if isinstance(x, Graph) else Graph(x, torch.zeros(()))
        return super().forward(graph.nodes + graph.positions.sum(), shift)


class ByInputsInObject(ByInputs):
    """The inputs reach the first unit in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GraphBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = Graph(torch.tanh(self.first(x.detach())), x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden) + torch.tanh(self.skip(x))


class AllowsUnused(Derives):
    """A gradient penalty that takes a missing gradient for none."""

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        (slopes,) = torch.autograd.grad(outputs.sum(), x, create_graph=True, allow_unused=True)
        return outputs.sum() * 0 if slopes is None else slopes.square().mean()


def refusal(make: Callable[[], Chain], check_steps: bool) -> str:
    torch.manual_seed(3)
    first = ["first"] if make is ByInputsOfFirst else []
    strategy = ParalPipelineStrategy(split="global", micro_batches=1, check_steps=check_steps, first_stage=first)
    with pytest.raises((ConfigurationError, RankFailedError)) as error:
        fit_chain(strategy, 2, module=make(), num_batches=2, num_sanity_val_steps=0)
    return str(error.value)


@pytest.mark.parametrize("check_steps", [True, False])
@pytest.mark.parametrize(
    "make",
    [ByInputs, ByInputsOfFirst, ByInputsInObject, AllowsUnused],
)
def test_gradients_that_would_pass_through_other_stages_are_refused(
    on_ranks: Any, rank_pool: Any, make: Any, check_steps: bool
) -> None:
    try:
        messages = on_ranks(2, refusal, make, check_steps)
    finally:
        rank_pool.renew_world()

    assert all(THROUGH_STAGES in message for message in messages), messages


class Shaped(nn.Module):
    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, out_width)
        self.out_width = out_width

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Narrows(Chain):
    """Units with outputs of different shapes, and code between them that needs these shapes."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH, 6, 4, 8, WIDTH]
        self.blocks = nn.ModuleList(Shaped(*pair) for pair in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        samples = len(x)
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x).view(samples, block.out_width)
        return self.out(x)


def narrowing() -> str:
    torch.manual_seed(3)
    strategy = ParalPipelineStrategy(split="global", units=["Shaped"], balance=[2, 2])
    with pytest.raises((ConfigurationError, RankFailedError)) as error:
        fit_chain(strategy, 2, module=Narrows(), num_batches=2)
    return str(error.value)


def test_code_between_units_of_an_earlier_stage_that_fails_is_named(on_ranks: Any, rank_pool: Any) -> None:
    messages = on_ranks(2, narrowing)
    rank_pool.renew_world()

    for message in messages:
        assert "validation_step failed between blocks.0 and blocks.1: RuntimeError: shape '[12, 6]'" in message
        assert "the code between them got the output of blocks.1 on this stage" in message


class Copies(Chain):
    """Gives a block the weights of one on another stage."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.blocks[3].load_state_dict(dict(self.blocks[0].named_parameters()), strict=False)


def refused() -> str:
    torch.manual_seed(3)
    with pytest.raises((ConfigurationError, RankFailedError, RuntimeError)) as error:
        fit_chain(ParalPipelineStrategy(split="global"), 2, module=Copies(), num_batches=4, num_sanity_val_steps=0)
    return str(error.value)


def test_copying_from_a_block_of_another_stage_is_refused(on_ranks, rank_pool) -> None:
    try:
        messages = on_ranks(2, refused)
    finally:
        rank_pool.renew_world()

    assert any("copy_.default was called on blocks.0.inner.weight of stage 0" in each for each in messages), messages
