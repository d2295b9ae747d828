"""Steps in pieces equal steps on the whole tensor, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.engines.zero.training.step_in_pieces import can_step_in_pieces, step_in_pieces

NUMEL = 3 * 64 + 10
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5, centered=True),
}


def flat() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).requires_grad_()


def steps(optimizer: Optimizer, parameter: Tensor, num_steps: int, seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        parameter.grad = torch.randn(NUMEL, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_give_the_same_bits_and_states(name: str) -> None:
    whole, pieces = flat(), flat()
    expected, found = OPTIMIZERS[name]([whole]), OPTIMIZERS[name]([pieces])
    step_in_pieces(found, piece_numel=64)

    for optimizer, parameter in ((expected, whole), (found, pieces)):
        steps(optimizer, parameter, 3)

    assert torch.equal(pieces, whole)
    for key, value in expected.state[whole].items():
        assert torch.equal(torch.as_tensor(found.state[pieces][key]), torch.as_tensor(value)), key
    assert found.param_groups[0]["params"] == [pieces]


def test_optimizers_of_others_step_on_the_whole_tensor() -> None:
    class Mine(torch.optim.SGD):
        pass

    assert can_step_in_pieces(torch.optim.SGD([flat()], lr=0.1))
    assert not can_step_in_pieces(Mine([flat()], lr=0.1))
