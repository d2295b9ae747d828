"""Fixtures for all tests."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def on_ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """Call as `on_ranks(world_size, function, *args)`; returns each rank's result."""
    return rank_pool.run


BUILD = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
from lightning_paral.zero.ops import load_operator
load_operator("cpu_adam", "the tests")
load_operator("async_io", "the tests")
"""


@pytest.fixture(scope="session")
def deepspeed_operators() -> None:
    """Compile DeepSpeed's operators, minutes on a new machine, before ranks with a time limit need them."""
    built = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, timeout=1200)
    assert built.returncode == 0, built.stdout + built.stderr


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """Forget what a launcher wrote into the environment (LOCAL_RANK, MASTER_PORT, ...)."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
