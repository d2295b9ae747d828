"""Modules that are built before `configure_model` are in memory on every rank, in full."""

import pytest

from lightning_paral.planning.following import follow_steps
from lightning_paral.planning.layout import layouts_of
from lightning_paral.planning.memory.construction import construction_memory
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.states import ModelStates
from tests.models.transformer import SmallTransformer
from tests.unit.planning.models import gpt


def late() -> SmallTransformer:
    """Return a module that is built in `configure_model`."""
    return SmallTransformer(width=16, num_layers=1)


@pytest.fixture(scope="module")
def states() -> ModelStates:
    return follow_steps(gpt(16, 1), None, StepSettings()).states


def peak(name: str, states: ModelStates, num_ranks: int, *, on_cpu: bool = True) -> int:
    (layout,) = layouts_of([name])
    return construction_memory(layout, states, num_ranks, on_cpu=on_cpu).peak_bytes


def test_early_parameters_are_counted(states: ModelStates) -> None:
    assert states.early_bytes == states.parameter_bytes
    assert follow_steps(late(), None, StepSettings()).states.early_bytes == 0


def test_late_parameters_are_built_in_shards() -> None:
    states = follow_steps(late(), None, StepSettings()).states

    assert peak("paral_fsdp", states, 8) == states.parameter_bytes // 8
    assert peak("paral_zero3", states, 8) == 3 * (states.parameter_bytes // 8)


@pytest.mark.parametrize("name", ["paral_ddp", "paral_zero1", "paral_zero2"])
def test_a_step_with_all_parameters_needs_more_than_construction(states: ModelStates, name: str) -> None:
    assert peak(name, states, 8) == 0


def test_modules_are_not_built_on_a_gpu(states: ModelStates) -> None:
    assert peak("paral_fsdp", states, 8, on_cpu=False) == 0
