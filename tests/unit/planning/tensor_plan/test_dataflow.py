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


class Unchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


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
        lambda m, x: m.down(torch.relu(m.up(x)).pow(2)),
        lambda m, x: m.down(m.up(x).relu_() ** 2.0),
        lambda m, x: m.down(0.5 * (m.up(x) + 1) / 3 - 2),
        lambda m, x: m.down(1 / -m.up(x).exp().clamp(min=0.1)),
        lambda m, x: m.down(m.up(x) * torch.tensor(2.0)),
        lambda m, x: m.down(m.up(x).to(torch.float64).type(torch.float32).contiguous().clone()),
        lambda m, x: m.down(m.up(x) * (m.up(x) > 0)),
        lambda m, x: m.down(functional.silu(m.up(x)).to(m.down.weight.dtype)),
        lambda m, x: m.down(m.up(x) if m.up(x).dim() > 1 and m.up(x).is_floating_point() else None),
        lambda m, x: m.down(nn.Sequential(nn.SiLU(), nn.Identity(), nn.ReLU(inplace=True))(m.up(x))),
        lambda m, x: m.down(input=m.up(input=x)),
        lambda m, x: m.down(checkpoint(lambda y: functional.gelu(m.up(y)), x, use_reentrant=False)),
        lambda m, x: checkpoint(lambda y: m.down(functional.gelu(m.up(y))), x, use_reentrant=True),
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
        (lambda m, x: m.down(m.up(x) * m.up(x).size(-1)), "used by size"),
        (lambda m, x: m.down(m.up(x).view(2, 3, 16)), "used by view"),
        (lambda m, x: m.down(functional.softmax(m.up(x), -1)), "used by softmax"),
        (lambda m, x: m.down(functional.layer_norm(m.up(x), (16,))), "used by layer_norm"),
        (lambda m, x: m.down(m.up(x)[..., :16]), "used by __getitem__"),
        (lambda m, x: m.down(torch.cat(m.up(x).chunk(2, -1), -1)), "used by chunk"),
        (lambda m, x: m.down(m.up(x) * m.down.bias.sum()), "used by mul"),
        (lambda m, x: m.down(functional.prelu(m.up(x), x.new_ones(1))), "used by prelu"),
        (lambda m, x: m.down(torch.exp(m.up(x).detach(), out=x.new_empty(0))), "used by exp"),
        (lambda m, x: m.down(x.new_zeros(2, 3, 16).add_(m.up(x))), "used by add_"),
        (lambda m, x: m.down(x.new_zeros(2, 3, 16).copy_(m.up(x))), "used by copy_"),
        (lambda m, x: m.down(functional.gelu(Custom.apply(m.up(x)))), "used by"),
        (lambda m, x: m.down(Custom.apply(m.up(x))), "used by"),
        (lambda m, x: (lambda h: m.down(h) + Unchanged.apply(h).mean())(m.up(x)), "used by"),
        (lambda m, x: (lambda h: m.down(h) + scripted(h).mean())(m.up(x)), "cannot be followed"),
        (lambda m, x: (lambda h: (h.register_hook(print), m.down(h))[1])(m.up(x)), "used by register_hook"),
        (lambda m, x: (lambda h: (m.kept.append(h), m.down(h))[1])(m.up(x)), "kept after the step"),
        (lambda m, x: (lambda h: (setattr(m, "last", h), m.down(h))[1])(m.up(x)), "kept after the step"),
        (lambda m, x: m.down(m.up(x)) + m.down(x.repeat(1, 1, 2)), "down is also called with another input"),
        (lambda m, x: m.up(x), "used by mean"),
    ],
)
def test_a_use_of_all_features_is_noticed(between: Any, reason: str) -> None:
    found = followed(step_with(between))

    assert found.reason is None
    assert found.chains == ()
    assert reason in found.leaks["up"]


def test_gate_and_up_are_split_together() -> None:
    found = followed(step_with(lambda m, x: m.down(functional.silu(m.gate(x)) * m.up(x))))

    assert [as_text(chain) for chain in found.chains] == [("gate up", "down")]


def test_a_gate_that_is_used_elsewhere_keeps_both_together() -> None:
    found = followed(step_with(lambda m, x: m.down(m.gate(x) * m.up(x)) + m.gate(x).mean()))

    assert found.chains == ()
    assert "gate is used with it" in found.leaks["up"]


def test_a_gate_with_one_feature_is_full() -> None:
    module = step_with(lambda m, x: m.down(m.gate(x).sigmoid() * m.up(x)))
    module.gate = nn.Linear(8, 1)

    assert chains(module) == []


def test_a_gate_whose_product_is_not_used_keeps_both_together() -> None:
    def between(m: Any, x: Tensor) -> Tensor:
        hidden, gate = m.up(x), m.gate(x)
        alias = hidden.detach()
        hidden.mul_(gate)
        return m.down(alias) + gate.mean()

    assert chains(step_with(between)) == []


def test_layers_in_a_row_pair_up() -> None:
    module = step_with(lambda m, x: m.net(x))
    module.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    assert chains(module) == [("net.0", "net.2")]

    module.net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8))
    assert chains(module) == [("net.0", "net.1"), ("net.2", "net.3")]


def test_two_layers_can_close_a_chain() -> None:
    module = step_with(lambda m, x: (lambda h: m.down(h) + m.other(h))(m.up(x)))
    module.other = nn.Linear(16, 8)

    assert chains(module) == [("up", "down other")]


def test_dropout_is_noticed() -> None:
    module = step_with(lambda m, x: m.down(functional.dropout(m.up(x), 0.1, m.training)))
    assert [chain.is_random for chain in followed(module).chains] == [True]

    module = step_with(lambda m, x: m.down(functional.dropout(m.up(x), 0.0)))
    assert [chain.is_random for chain in followed(module).chains] == [False]


def test_a_returned_tensor_is_used() -> None:
    module = step_with(lambda m, x: None)

    def training_step(batch: Tensor, batch_idx: int) -> Any:
        hidden = module.up(batch)
        return {"loss": module.down(hidden).mean(), "hidden": hidden}

    module.training_step = training_step  # type: ignore[method-assign]
    assert followed(module).leaks["up"] == "it is returned from the step"


def test_hooks_of_users_are_seen() -> None:
    module = Step()
    module.up.register_forward_hook(lambda part, args, output: output - output.mean())
    assert "used by mean" in followed(module).leaks["up"]

    module = Step()
    module.down.register_forward_pre_hook(lambda part, args: (args[0] / args[0].norm(),))
    assert "used by norm" in followed(module).leaks["up"]

    module = Step()
    module.up.register_forward_hook(lambda part, args, output: module.kept.append(output))
    assert "kept after" in followed(module).leaks["up"]

    module = Step()
    module.up.register_full_backward_hook(lambda part, inputs, outputs: None)
    assert followed(module).chains == ()

    module = Step()
    module.down.register_full_backward_pre_hook(lambda part, outputs: None)
    assert followed(module).chains == ()


def test_weights_that_are_used_outside_of_their_layer_are_noticed() -> None:
    module = step_with(lambda m, x: m.down(m.up(x)) + m.up.weight.norm() + functional.linear(x, m.gate.weight).mean())

    assert followed(module).used_directly == {"up": "norm", "gate": "linear"}


def test_functional_calls_are_noticed() -> None:
    def between(m: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(m.up, {"weight": m.down.weight.T, "bias": None}, (x,))

    assert {"up", "down"} <= set(followed(step_with(between)).used_directly)


def test_values_prove_nothing() -> None:
    module = step_with(lambda m, x: m.down(m.up(x)) * x.sum().item())

    found = observed(module)

    assert found.chains == ()
    assert found.reason == "training_step cannot be followed: it reads values of tensors"


def test_compiled_modules_prove_nothing() -> None:
    module = Step()
    module.up.compile(backend="eager")

    assert observed(module).reason == "up is compiled"


def test_validation_counts() -> None:
    class Validated(Step):
        def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.up(batch).mean()

    found = observed(Validated(), evaluations={"validation_step": lambda: [INPUTS]})

    assert "used by mean" in found.leaks["up"]


def test_validation_may_read_values_when_no_split_activation_is_left() -> None:
    class Validated(Step):
        def validation_step(self, batch: Tensor, batch_idx: int) -> float:
            return self(batch).mean().item()

    class Early(Step):
        def validation_step(self, batch: Tensor, batch_idx: int) -> float:
            return self(batch).mean() if batch.mean().item() > 0 else self.up(batch).mean()

    class Holding(Step):
        def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
            hidden = self.up(batch)
            return self.down(hidden).mean().item() + hidden.norm()

    evaluations = {"validation_step": lambda: [INPUTS]}
    found = observed(Validated(), evaluations=evaluations)

    assert [as_text(chain) for chain in found.chains] == PROVEN
    assert found.notes == ("validation_step could be followed in part only: it reads values of tensors",)
    assert chains_in_fork(Early(), evaluations=evaluations) == []
    assert chains_in_fork(Holding(), evaluations=evaluations) == []


def test_manual_optimization_is_followed() -> None:
    class Manual(Step):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            loss = self(batch).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    assert chains_in_fork(Manual()) == PROVEN


def test_the_module_does_not_change() -> None:
    module = Step()
    before = list(module.parameters())

    observed(module)

    assert all(first is second for first, second in zip(before, module.parameters(), strict=True))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_a_step_on_ordinary_tensors_is_followed() -> None:
    module = Step()

    found = plan_by_dataflow(module, lambda: module(torch.randn(2, 3, 8)).sum())

    assert [as_text(chain) for chain in found.chains] == PROVEN


def test_the_example() -> None:
    found = observed(gpt(num_layers=2), bytes_of_text())

    assert [as_text(chain) for chain in found.chains] == [
        (f"blocks.{number}.feed_forward.1", f"blocks.{number}.feed_forward.3") for number in range(2)
    ]
    assert found.heads == {"head"}
    assert found.leaks["blocks.0.query_key_value"] == "its output is used by chunk"
