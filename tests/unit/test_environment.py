"""Tests do not inherit what other tests and fixtures set in the environment."""

import os

import pytest
from lightning.pytorch import seed_everything


@pytest.fixture(scope="module")
def seeded() -> str:
    """The seed in the environment at the end of the fixture."""
    seed_everything(7, workers=True, verbose=False)
    return os.environ["PL_GLOBAL_SEED"]


def test_seed_of_a_fixture_of_the_module_is_not_that_of_later_runs(seeded: str) -> None:
    assert seeded == "7"
    assert "PL_GLOBAL_SEED" not in os.environ
    assert "PL_SEED_WORKERS" not in os.environ
