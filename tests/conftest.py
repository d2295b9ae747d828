"""Fixtures for all tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

from lightning_paral.distributed.process_group import release_process_group
from tests.lanes import OPERATORS, is_slow, needs_deepspeed, needs_operators
from tests.rank_pool import RankPool

# A shell starts what runs in its background with SIGINT ignored, and processes started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
from lightning_paral.engines.zero.runtime.operators import load_operator
load_operator("cpu_adam", "the tests")
load_operator("async_io", "the tests")
"""
_build = pytest.StashKey["subprocess.Popen[str]"]()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests, and let those come last that need DeepSpeed's operators: compiling these takes minutes."""
    for item in items:
        if needs_deepspeed(item):
            item.add_marker("deepspeed")
        if is_slow(item):
            item.add_marker("slow")
    items.sort(key=needs_operators)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start to compile DeepSpeed's operators, on what processor time the tests leave."""
    if session.config.option.collectonly:
        return
    if any(map(needs_operators, session.items)):
        command = ["nice", "-n", "5", sys.executable, "-c", BUILD]
        session.config.stash[_build] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the compilation where no test waited for it."""
    build = session.config.stash.get(_build, None)
    if build is not None and build.poll() is None:
        os.killpg(build.pid, signal.SIGTERM)  # the compilers, too
        build.communicate(timeout=30)


@pytest.fixture(scope="session")
def deepspeed_operators(request: pytest.FixtureRequest) -> None:
    """Wait until DeepSpeed's operators are compiled, before ranks with a time limit need them."""
    build = request.config.stash[_build]
    if build.poll() is None:
        with suppress(PermissionError):  # only root may
            os.setpriority(os.PRIO_PGRP, build.pid, 0)
    said, _ = build.communicate(timeout=3600)
    assert build.returncode == 0, said


@pytest.fixture(autouse=True)
def _operators_of_this_parameter(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker(OPERATORS):
        request.getfixturevalue(OPERATORS)


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """Forget what fits write into the environment, those of this test and those of fixtures that were made before."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    before = dict(os.environ)
    rank_zero_only.rank = 0  # strategies set it when they are made, to what the environment of their test says
    yield
    release_process_group()  # which stays after a fit
    if dist.is_initialized():
        dist.destroy_process_group()  # Lightning's own ddp leaves one, too
    os.environ.clear()
    os.environ.update(before)
