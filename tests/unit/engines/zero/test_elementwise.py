"""ZeRO finds by a trial whether an optimizer is elementwise, so that it may update flat shards."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from lightning_paral.engines.zero.training.elementwise import check_elementwise
from lightning_paral.engines.zero.training.users_optimizer import UsersOptimizer, make_twin
from lightning_paral.errors import ConfigurationError
from tests.models.regression import Regression

ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


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


class Langevin(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * (parameter.grad + torch.randn_like(parameter)))


def parameters() -> list[Parameter]:
    return [Parameter(torch.ones(2, 3))]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("lr", [0.1, 1e-6, 0.0])  # 0: a warm-up has begun
def test_elementwise_optimizers_pass_and_do_not_change(name: str, lr: float) -> None:
    ours = parameters()
    optimizer = getattr(torch.optim, name)(ours, lr=lr)
    before, random = {key: dict(value) for key, value in optimizer.state.items()}, torch.get_rng_state()
    check_elementwise(optimizer)
    assert torch.equal(ours[0], torch.ones(2, 3))
    assert ours[0].grad is None
    assert {key: dict(value) for key, value in optimizer.state.items()} == before
    assert optimizer.param_groups[0]["lr"] == lr
    assert torch.equal(torch.get_rng_state(), random)


def test_optimizer_of_ones_own_passes_if_it_is_elementwise() -> None:
    check_elementwise(Lion(parameters()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.Adafactor, "Adafactor is not elementwise"),
        (torch.optim.Muon, "Muon cannot step on flat tensors"),
        (Lars, "Lars is not elementwise.*paral_ddp.*trust_optimizer=True"),
        (Langevin, "Langevin is not elementwise"),
    ],
)
def test_optimizers_that_are_not_elementwise_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_elementwise(make(parameters()))


def test_twin_follows_the_users_groups_and_shares_neither_state_nor_step() -> None:
    module = Regression()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    users = UsersOptimizer(optimizer, module)
    twin = make_twin(optimizer, users.trained_groups())
    flat = Parameter(torch.zeros(4))
    twin.param_groups[0]["params"] = [flat]
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda ours, *_: seen.append(ours))
    optimizer.register_step_post_hook(lambda ours, *_: seen.append(ours))
    users.before_step()
    flat.grad = torch.ones(4)
    twin.step()
    users.after_step()
    scheduler.step()
    users.before_step()
    assert twin.param_groups[0]["lr"] == pytest.approx(0.05)
    assert optimizer.param_groups[0]["params"] == list(module.parameters())
    assert seen[:2] == [optimizer, optimizer]
    assert list(twin.state) == [flat]
    assert not optimizer.state
