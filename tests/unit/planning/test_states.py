"""Model states are counted without allocating them, and divided as in the ZeRO paper."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_paral.planning.fake_step import StepFollower
from lightning_paral.planning.isolated import run_isolated
from lightning_paral.planning.layout import layouts_of
from lightning_paral.planning.memory.model_states import model_state_bytes
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates, ParameterState, assume_adam, count_states
from tests.unit.planning.models import Adversarial, bytes_of_text, gpt


class Tied(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(8)


def test_tied_parameters_count_once_and_frozen_ones_have_no_gradient() -> None:
    states = count_states(Tied())

    assert states.num_params == 16 * 8 + 8 * 8 + 8 + 2 * 8
    assert states.num_trained == 16 * 8 + 2 * 8
    assert states.gradient_bytes == 4 * states.num_trained
    assert states.buffer_bytes == 2 * 8 * 4 + 8
    assert assume_adam(states).optimizer_bytes == 8 * states.num_trained


def test_optimizer_states_are_those_that_the_optimizers_create() -> None:
    def follow() -> ModelStates:
        follower = StepFollower(Adversarial(), StepSettings())
        follower.configure_optimizers()
        follower.follow(torch.zeros(4, 8))
        return follower.states()

    states = run_isolated(follow)

    generator, critic = 8 * 8 + 8, 8 + 1
    assert states.num_optimizers == 2
    assert sum(state.optimizer_numel for state in states.parameters) == generator + 2 * critic
    assert states.optimizer_bytes == 4 * (generator + 2 * critic) + 4 * 2  # Adam counts the steps of both parameters


def test_counts_equal_live_tensors_after_a_real_step() -> None:
    def follow() -> ModelStates:
        follower = StepFollower(gpt(), StepSettings())
        follower.configure_optimizers()
        follower.follow(bytes_of_text())
        return follower.states()

    module = gpt()
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    optimizer = module.configure_optimizers()["optimizer"]
    module.training_step(bytes_of_text(), 0).backward()
    optimizer.step()

    counted = count_states(module, [optimizer])
    assert run_isolated(follow) == replace(counted, early_bytes=counted.parameter_bytes)


@pytest.mark.parametrize(
    ("stage", "num_ranks", "gigabytes"), [(1, 1, 120.0), (1, 64, 31.4), (2, 64, 16.6), (3, 64, 1.9)]
)
def test_states_are_those_of_figure_1_of_the_zero_paper(stage: int, num_ranks: int, gigabytes: float) -> None:
    parameter = ParameterState(name="weight", shape=(7_500, 1000), dtype=torch.bfloat16, is_trained=True)
    states = assume_adam(ModelStates(parameters=(parameter,) * 1000, buffer_bytes=0))
    (layout,) = layouts_of([f"paral_zero{stage}"])

    found = model_state_bytes(layout, states, num_ranks, StepSettings(precision="bf16-true"))

    assert sum(found.values()) / 1e9 == pytest.approx(gigabytes, abs=0.07)
