"""Parameters that are used between two layers: their gradients would be parts of a sum, so their layers gather."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_paral.planning.tensor_plan.trace import plan_by_dataflow
from tests.unit.planning.tensor_plan.models import INPUTS, Step, chains, observed


class Between(Step):
    """What is between `up` and `down` has parameters."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.scale, self.features = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(16))
        self.one, self.prelu = nn.Parameter(torch.ones(1)), nn.PReLU()
        self.register_buffer("constant", torch.tensor(3.0))
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.down(self.between(self, self.up(x)))


@pytest.mark.parametrize(
    "between",
    [
        lambda m, h: m.scale * h,
        lambda m, h: h * (m.scale + 1).exp(),
        lambda m, h: h.mul_(m.scale),
        lambda m, h: h.clone().div_(m.scale),
        lambda m, h: h + m.scale,
        lambda m, h: h - m.scale,
        lambda m, h: torch.pow(h, m.scale),
        lambda m, h: torch.maximum(h, m.scale),
        lambda m, h: h.clamp(min=m.scale),
        lambda m, h: h * m.one,
        lambda m, h: h * m.features,
        lambda m, h: h + m.features,
        lambda m, h: m.prelu(h),
        lambda m, h: functional.prelu(h, m.scale.reshape(1)),
        lambda m, h: torch.lerp(h, h, m.scale),
        lambda m, h: torch.addcmul(h, h, m.scale),
        lambda m, h: torch.where(h > 0, h, m.scale),
        lambda m, h: h * m.up.bias,
        lambda m, h: m.scale if h is None else torch.sub(m.scale, h),
    ],
)
def test_a_learnable_parameter_between_two_layers_makes_the_first_gather(between: Any) -> None:
    module = Between(between)

    found = plan_by_dataflow(module, lambda: module.training_step(INPUTS, 0))

    assert found.reason is None
    assert found.chains == ()
    assert found.leaks["up"].startswith("its output is used by")


@pytest.mark.parametrize("between", [lambda m, h: m.scale * h, lambda m, h: h * m.gate.bias.mean()])
def test_a_frozen_parameter_counts_since_it_may_be_unfrozen(between: Any) -> None:
    module = Between(between)
    module.requires_grad_(False)

    assert chains(module) == []


def test_a_buffer_with_one_number_is_a_constant() -> None:
    assert chains(Between(lambda m, h: m.constant * h)) == [("up", "down")]


def test_a_number_that_is_computed_from_the_input_and_a_parameter_needs_a_gradient() -> None:
    class Routed(Step):
        def forward(self, x: Tensor) -> Any:
            return self.down(self.up(x) * self.gate(x).mean())

    class Learned(Step):
        def forward(self, x: Tensor) -> Any:
            return self.down(self.up(x) * x.mean())

    assert chains(Routed()) == []
    assert chains(Learned()) == [("up", "down")], "the input needs no gradient"


class Alone(LightningModule):
    """One square layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.square, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.square(self.square(x).relu())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(self(batch.repeat(1, 1, 2))).mean()


def test_a_layer_that_follows_itself_gathers() -> None:
    found = observed(Alone())

    assert found.chains == ()
    assert "square is used both before and after it" in found.leaks["square"]


def test_a_layer_that_would_close_two_chains_gathers() -> None:
    class Twice(Alone):
        def forward(self, x: Tensor) -> Tensor:
            return self.square(self.square(self.first(x[..., :8])))

    assert observed(Twice()).chains == ()


def test_a_residual_connection_around_the_first_layer_gathers() -> None:
    class Residual(Alone):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.square(x)

    assert observed(Residual()).leaks["square"] == "its output is used by add"


def test_batches_of_one_sample_without_a_batch_dimension() -> None:
    assert chains(Step(), INPUTS[0, 0]) == [("up", "down")]
