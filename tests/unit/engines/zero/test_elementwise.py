"""ZeRO finds by a trial whether an optimizer is elementwise, so that it may update flat shards."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_paral.engines.zero.training.elementwise import check_elementwise
from lightning_paral.errors import ConfigurationError

ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "Lion",
)


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.sub_(group["lr"] * torch.sign(0.9 * average + 0.1 * parameter.grad))
                average.lerp_(parameter.grad, 0.01)


class Lars(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                trust = parameter.norm() / parameter.grad.norm()
                parameter.sub_(group["lr"] * trust * parameter.grad)


class Wrapping(Lion):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups)
        self.inner = inner


def parameters() -> list[Parameter]:
    return [Parameter(torch.ones(2, 3))]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("lr", [0.1, 0.0])  # 0: a warm-up has begun
def test_elementwise_optimizers_pass_and_do_not_change(name: str, lr: float) -> None:
    ours = parameters()
    optimizer = Lion(ours, lr) if name == "Lion" else getattr(torch.optim, name)(ours, lr=lr)
    before, random = {key: dict(value) for key, value in optimizer.state.items()}, torch.get_rng_state()
    check_elementwise(optimizer)
    assert torch.equal(ours[0], torch.ones(2, 3))
    assert ours[0].grad is None
    assert {key: dict(value) for key, value in optimizer.state.items()} == before
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.Adafactor, "Adafactor is not elementwise"),
        (torch.optim.Muon, "Muon cannot step on flat tensors"),
        (Lars, "Lars is not elementwise.*paral_ddp.*trust_optimizer=True"),
        (lambda ours: Wrapping(torch.optim.SGD(ours)), "Wrapping refers to another optimizer.*'inner'"),
    ],
)
def test_optimizers_that_are_not_elementwise_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_elementwise(make(parameters()))
