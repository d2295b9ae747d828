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
from tests.distributed.pipeline.test_shards import assert_close, weights_of
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


class ByHead(Derives):
    """The norm of the gradient by the last layer, and a second derivative (GradNorm)."""

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(outputs.mean(), self.out.weight, create_graph=True)
        return slope.square().sum()


class ByOutputs(Derives):
    """The gradient by what the last unit has returned."""

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(outputs.square().sum(), outputs, create_graph=True)
        return slope.square().mean()


class Apart(Derives):
    """The gradient by inputs of a network that is no part of the chain, computed before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = nn.Linear(FEATURES, 1)

    def slopes(self, x: Tensor) -> Tensor:
        (slopes,) = torch.autograd.grad(torch.tanh(self.apart(x)).sum(), x, create_graph=True)
        return slopes

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.slopes(x) if x.requires_grad else x)

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        return self.slopes(x).square().mean()


class OfHead(Derives):
    """A derivative of each sample of the code after the chain, by torch.func."""

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda y: (y @ self.out.weight).square().sum()))(outputs)
        return slopes.square().mean()


class Energy(Block):
    """A block that follows the gradient of an energy by its own input."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        (force,) = torch.autograd.grad(torch.tanh(self.inner(x)).sum(), x, create_graph=True)
        return x - 0.1 * force


class Energies(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Energy() for _ in range(4))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            super().validation_step(batch, batch_idx)


def fit_derived(make: Callable[[], Chain], options: dict[str, Any] | None, world_size: int) -> Any:
    torch.manual_seed(3)
    strategy = "auto" if options is None else ParalPipelineStrategy(split="global", **options)
    losses, module, _ = fit_chain(strategy, world_size, module=make(), num_batches=4, num_sanity_val_steps=0)
    return losses, weights_of(module)


@pytest.mark.parametrize("make", [ByHead, ByOutputs, Apart, OfHead, Energies])
def test_gradients_that_pass_through_no_other_stage_equal_one_process(on_ranks: Any, make: Any) -> None:
    losses, weights = fit_derived(make, None, 1)

    for of_rank, found in on_ranks(2, fit_derived, make, {"micro_batches": 1}, 2):
        assert of_rank == pytest.approx(losses, rel=1e-5)
        assert_close(found, weights)


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


class BySharedWeight(Derives):
    """The gradient by a weight that is used before the chain and after it."""

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.first.weight, create_graph=True)[0].square().sum()


class ByWeightOfBlock(Derives):
    """The gradient by a weight of another stage, taken for none."""

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        torch.autograd.grad(loss, self.blocks[0].inner.weight, retain_graph=True, allow_unused=True)
        return loss


class InValidation(ByInputs):
    """The gradient by inputs in `validation_step`, as for forces."""

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slopes,) = torch.autograd.grad(self(x).sum(), x)
        self.log("slopes", slopes.mean())


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
    [ByInputs, ByInputsOfFirst, ByInputsInObject, AllowsUnused, BySharedWeight, ByWeightOfBlock, InValidation],
)
def test_gradients_that_would_pass_through_other_stages_are_refused(
    on_ranks: Any, rank_pool: Any, make: Any, check_steps: bool
) -> None:
    try:
        messages = on_ranks(2, refusal, make, check_steps)
    finally:
        rank_pool.renew_world()

    assert all(THROUGH_STAGES in message for message in messages), messages


class ReadsGradients(Chain):
    """Reads gradients of weights that are on all stages, after each backward pass and each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def read(self) -> None:
        outside = (*self.first.parameters(), self.scale, self.shift, *self.out.parameters())
        self.norms += [float(parameter.grad.norm()) for parameter in outside]

    def on_after_backward(self) -> None:
        self.read()

    def on_train_batch_end(self, *args: Any) -> None:
        self.read()


def fit_reading(options: dict[str, Any] | None, world_size: int) -> list[float]:
    torch.manual_seed(3)
    strategy = "auto" if options is None else ParalPipelineStrategy(split="global", **options)
    _, module, _ = fit_chain(
        strategy, world_size, module=ReadsGradients(), num_batches=6, accumulate_grad_batches=3, gradient_clip_val=None
    )
    assert isinstance(module, ReadsGradients)
    return module.norms


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_that_accumulate_are_those_of_all_stages(on_ranks: Any, micro_batches: int) -> None:
    expected = fit_reading(None, 1)

    for norms in on_ranks(2, fit_reading, {"micro_batches": micro_batches}, 2):
        assert norms == pytest.approx(expected, rel=1e-5)


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


class IteratesOverState(Chain):
    """Adds up the states of the optimizer."""

    def on_train_batch_end(self, *args: Any) -> None:
        sum(state["exp_avg"].norm() for state in self.optimizers().state.values() if state)


class GetsState(Chain):
    """Gets the state of each parameter, or nothing."""

    def on_train_batch_end(self, *args: Any) -> None:
        state = self.optimizers().state
        [state[parameter].get("exp_avg") for parameter in self.parameters()]


def refused(make: Callable[[], Chain]) -> str:
    torch.manual_seed(3)
    with pytest.raises((ConfigurationError, RankFailedError, RuntimeError)) as error:
        fit_chain(ParalPipelineStrategy(split="global"), 2, module=make(), num_batches=4, num_sanity_val_steps=0)
    return str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Copies, "copy_.default was called on blocks.0.inner.weight of stage 0"),
        (IteratesOverState, "Code has iterated over optimizer.state"),
        (GetsState, "The optimizer's state of blocks."),
    ],
)
def test_values_of_other_stages_that_hooks_read_are_refused(on_ranks, rank_pool, make: Any, message: str) -> None:
    try:
        messages = on_ranks(2, refused, make)
    finally:
        rank_pool.renew_world()

    assert any(message in each for each in messages), messages
