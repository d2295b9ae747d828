"""What following a step proves: which activations can stay split between two linear layers."""

from typing import Any

import pytest
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_paral.engines.tensor.planner.observations import Observations
from lightning_paral.engines.tensor.planner.trace import plan_by_dataflow
from tests.models.planned import bytes_of_text, gpt
from tests.unit.engines.tensor.planner.models import INPUTS, Step, as_text, observed


def followed(module: Step) -> Observations:
    """Return what a step on ordinary tensors shows, in this process."""
    return plan_by_dataflow(module, lambda: module.training_step(INPUTS, 0))


def step_with(between: Any) -> Step:
    """Return a module in which `between(module, x)` is what the step does."""
    module = Step()
    module.forward = lambda x: between(module, x)  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize(
    "between",
    [
        lambda m, x: m.down(m.up(x)),
        lambda m, x: m.down(0.5 * (m.up(x) + 1) / 3 - 2),
        lambda m, x: m.down(checkpoint(lambda y: functional.gelu(m.up(y)), x, use_reentrant=False)),
    ],
)
def test_features_stay_apart(between: Any) -> None:
    assert [as_text(chain) for chain in followed(step_with(between)).chains] == [("up", "down")]


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda m, x: m.down(m.up(x) + x.repeat(1, 1, 2)), "used by add"),
        (lambda m, x: m.down(m.up(x)) + m.up(x).mean(), "used by mean"),
        (lambda m, x: m.down(m.up(x) * m.up(x).shape[-1]), "its shape is read"),
        (lambda m, x: (lambda h: (m.kept.append(h), m.down(h))[1])(m.up(x)), "kept after the step"),
        (lambda m, x: m.down(m.up(x)) + m.down(x.repeat(1, 1, 2)), "down is also called with another input"),
    ],
)
def test_a_use_of_all_features_is_noticed(between: Any, reason: str) -> None:
    found = followed(step_with(between))

    assert found.reason is None
    assert found.chains == ()
    assert reason in found.leaks["up"]


def test_the_example() -> None:
    found = observed(gpt(num_layers=2), bytes_of_text())

    assert [as_text(chain) for chain in found.chains] == [
        (f"blocks.{number}.feed_forward.1", f"blocks.{number}.feed_forward.3") for number in range(2)
    ]
    assert found.heads == {"head"}
    assert found.leaks["blocks.0.query_key_value"] == "its output is used by chunk"
