"""What following a step proves: which activations can stay split between two linear layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_paral.planning.tensor_plan.observations import Observations
from lightning_paral.planning.tensor_plan.trace import plan_by_dataflow
from tests.unit.planning.models import bytes_of_text, gpt
from tests.unit.planning.tensor_plan.models import INPUTS, Step, as_text, observed
from tests.unit.planning.tensor_plan.models import chains as chains_in_fork

PROVEN = [("up", "down")]


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def followed(module: Step) -> Observations:
    """Return what a step on ordinary tensors shows, in this process."""
    return plan_by_dataflow(module, lambda: module.training_step(INPUTS, 0))


def chains(module: Step) -> list[tuple[str, str]]:
    return [as_text(chain) for chain in followed(module).chains]


def step_with(between: Any) -> Step:
    """Return a module in which `between(module, x)` is what the step does."""

    class Made(Step):
        def forward(self, x: Tensor) -> Any:
            return between(self, x)

    return Made()


@pytest.mark.parametrize(
    "between",
    [
        lambda m, x: m.down(m.up(x)),
        lambda m, x: m.down(functional.gelu(m.up(x), approximate="tanh")),
        lambda m, x: m.down(0.5 * (m.up(x) + 1) / 3 - 2),
        lambda m, x: m.down(m.up(x).to(torch.float64).type(torch.float32).contiguous().clone()),
        lambda m, x: m.down(functional.silu(m.up(x)).to(m.down.weight.dtype)),
        lambda m, x: m.down(nn.Sequential(nn.SiLU(), nn.Identity(), nn.ReLU(inplace=True))(m.up(x))),
        lambda m, x: m.down(checkpoint(lambda y: functional.gelu(m.up(y)), x, use_reentrant=False)),
        lambda m, x: m.down(m.up(x)) + m.down(m.up(x + 1).tanh()),
    ],
)
def test_features_stay_apart(between: Any) -> None:
    assert chains(step_with(between)) == PROVEN


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda m, x: m.down(m.up(x) + x.repeat(1, 1, 2)), "used by add"),
        (lambda m, x: m.down(m.up(x)) + m.up(x).mean(), "used by mean"),
        (lambda m, x: m.down(m.up(x) * m.up(x).shape[-1]), "its shape is read"),
        (lambda m, x: m.down(m.up(x).view(2, 3, 16)), "used by view"),
        (lambda m, x: m.down(functional.softmax(m.up(x), -1)), "used by softmax"),
        (lambda m, x: m.down(m.up(x)[..., :16]), "used by __getitem__"),
        (lambda m, x: m.down(m.up(x) * m.down.bias.sum()), "used by mul"),
        (lambda m, x: m.down(x.new_zeros(2, 3, 16).add_(m.up(x))), "used by add_"),
        (lambda m, x: m.down(Custom.apply(m.up(x))), "used by"),
        (lambda m, x: (lambda h: (h.register_hook(print), m.down(h))[1])(m.up(x)), "used by register_hook"),
        (lambda m, x: (lambda h: (m.kept.append(h), m.down(h))[1])(m.up(x)), "kept after the step"),
        (lambda m, x: m.down(m.up(x)) + m.down(x.repeat(1, 1, 2)), "down is also called with another input"),
        (lambda m, x: m.up(x), "used by mean"),
    ],
)
def test_a_use_of_all_features_is_noticed(between: Any, reason: str) -> None:
    found = followed(step_with(between))

    assert found.reason is None
    assert found.chains == ()
    assert reason in found.leaks["up"]


class Between(Step):
    """What is between `up` and `down` has parameters."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.scale, self.features, self.prelu = (
            nn.Parameter(torch.tensor(2.0)),
            nn.Parameter(torch.ones(16)),
            nn.PReLU(),
        )
        self.register_buffer("constant", torch.tensor(3.0))
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.down(self.between(self, self.up(x)))


@pytest.mark.parametrize(
    "between",
    [
        lambda m, h: m.scale * h,
        lambda m, h: h.mul_(m.scale),
        lambda m, h: h + m.scale,
        lambda m, h: h * m.features,
        lambda m, h: m.prelu(h),
        lambda m, h: torch.where(h > 0, h, m.scale),
        lambda m, h: h * m.up.bias,
    ],
)
def test_gradients_of_a_parameter_between_two_layers_would_be_parts_of_a_sum(between: Any) -> None:
    found = followed(Between(between))

    assert found.chains == ()
    assert found.leaks["up"].startswith("its output is used by")


def test_a_frozen_parameter_counts_since_it_may_be_unfrozen() -> None:
    assert chains_in_fork(Between(lambda m, h: m.scale * h).requires_grad_(False)) == []


def test_a_buffer_with_one_number_is_a_constant() -> None:
    assert chains(Between(lambda m, h: m.constant * h)) == PROVEN


def test_gate_and_up_are_split_together() -> None:
    found = followed(step_with(lambda m, x: m.down(functional.silu(m.gate(x)) * m.up(x))))

    assert [as_text(chain) for chain in found.chains] == [("gate up", "down")]


def test_weights_that_are_used_outside_of_their_layer_are_noticed() -> None:
    module = step_with(lambda m, x: m.down(m.up(x)) + m.up.weight.norm() + functional.linear(x, m.gate.weight).mean())

    assert followed(module).used_directly == {"up": "norm", "gate": "linear"}


def test_values_prove_nothing() -> None:
    module = step_with(lambda m, x: m.down(m.up(x)) * x.sum().item())

    found = observed(module)

    assert found.chains == ()
    assert found.reason == "training_step cannot be followed: it reads values of tensors"


def test_validation_counts() -> None:
    class Validated(Step):
        def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.up(batch).mean()

    found = observed(Validated(), evaluations={"validation_step": lambda: [INPUTS]})

    assert "used by mean" in found.leaks["up"]


def test_the_example() -> None:
    found = observed(gpt(num_layers=2), bytes_of_text())

    assert [as_text(chain) for chain in found.chains] == [
        (f"blocks.{number}.feed_forward.1", f"blocks.{number}.feed_forward.3") for number in range(2)
    ]
    assert found.heads == {"head"}
    assert found.leaks["blocks.0.query_key_value"] == "its output is used by chunk"
