"""Readers return full gradients, parameters and optimizer state in hooks, equal under every strategy."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_paral import ParalFSDPStrategy, ParalZeROStrategy
from lightning_paral.model.gradients import gradient_norm
from tests.models.regression import GLOBAL_BATCH_SIZE, Regression, regression_data
from tests.running import quiet_trainer

NUM_BATCHES = 2


def read_values(
    strategy: Any, parameters: dict[str, Parameter], optimizer: Any, *, with_state: bool
) -> dict[str, Tensor]:
    """Return gradients, values and the gradient norm of `parameters`, and if `with_state` Adam's moments and steps."""
    found: dict[str, Tensor] = {}
    has_readers = hasattr(strategy, "full_gradient")
    for name, parameter in parameters.items():
        if has_readers:
            found |= {name: strategy.full_gradient(parameter), f"{name} value": strategy.full_parameter(parameter)}
        else:
            found |= {name: parameter.grad, f"{name} value": parameter}  # type: ignore[dict-item]
        for key in ("exp_avg", "step") if with_state else ():
            read = strategy.full_optimizer_state if has_readers else lambda p, key: optimizer.state[p][key]
            found[f"{name} {key}"] = read(parameter, key)
    if has_readers:
        found["norm"] = strategy.gradient_norm(optimizer)
    else:
        found["norm"] = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters.values()])  # type: ignore[misc]
    return {name: value.detach().clone() for name, value in found.items()}


class Reads(Regression):
    """Records the results of the readers in each step, or in one process the values themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        if self.global_step == 0 and hasattr(strategy, "full_optimizer_state"):
            with pytest.raises(ValueError, match="no state 'exp_avg'"):
                strategy.full_optimizer_state(self.hidden.weight, "exp_avg")
        is_zero = isinstance(strategy, ParalZeROStrategy)  # whose norm is that of one of the run's optimizers
        for parameters in (dict(self.named_parameters()), *([] if is_zero else [{"one": self.hidden.weight}])):
            of = optimizer if len(parameters) > 1 else torch.optim.SGD([self.hidden.weight], lr=0.1)
            with_state = len(parameters) > 1 and self.global_step > 0
            self.read.append(read_values(strategy, parameters, of, with_state=with_state))


def read_in_fit(num_ranks: int, **options: Any) -> list[dict[str, Tensor]]:
    torch.manual_seed(3)
    model = Reads()
    quiet_trainer(max_epochs=1, **options).fit(model, regression_data(NUM_BATCHES, num_ranks))
    assert all(type(value) is Tensor for each in model.read for value in each.values())
    return model.read


def read_on_rank(strategy: Any) -> list[dict[str, Tensor]]:
    return read_in_fit(2, devices=2, strategy=strategy)


UNITS = pytest.param(ParalFSDPStrategy(units=[torch.nn.Linear]), id="fsdp")


@pytest.mark.parametrize(
    "strategy", ["paral_ddp", UNITS, "paral_zero2", "paral_zero3", "paral_zero2_offload", "paral_zero3_offload"]
)
def test_readers_equal_one_process(on_ranks, strategy: Any) -> None:
    expected = read_in_fit(1, devices=1)
    for read in on_ranks(2, read_on_rank, strategy):
        # Under ZeRO, of all parameters only
        torch.testing.assert_close(read, expected[:: len(expected) // len(read)])


def test_readers_of_dp_equal_one_device() -> None:
    assert GLOBAL_BATCH_SIZE % 2 == 0
    torch.testing.assert_close(read_in_fit(1, devices=2, strategy="paral_dp"), read_in_fit(1, devices=1))


def test_norm_includes_gradients_of_every_kind() -> None:
    model = Regression()
    model.table = torch.nn.Embedding(4, 2, sparse=True)
    model.phase = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.cdouble))
    model.double()
    looked_up = model.table(torch.tensor([1, 1, 3])).square().sum()
    (looked_up + model.phase.abs().square().sum() + model(torch.ones(2, 8, dtype=torch.double)).sum()).backward()
    dense = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]
    expected = torch.cat([gradient.abs().flatten() for gradient in dense]).norm()
    torch.testing.assert_close(gradient_norm(model.parameters()), expected, rtol=1e-12, atol=0.0)
