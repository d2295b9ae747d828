"""Fixtures for all tests."""

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

from lightning_paral.diagnostics.rank_pool import RankPool
from lightning_paral.distributed.process_group import release_process_group
from tests.compile_operators import MARK, Compilation, mark_by_parameters, needs_operators
from tests.lanes import ENGINES, LANES, Times, function_of, select, shard
from tests.launching import launch as launch

OF_RUNS = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"),
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
)
"""Environment variables that change what a run does. Tests start without them."""

for _name in OF_RUNS:
    os.environ.pop(_name, None)
# Tests start `paral`, `torchrun` and other commands of the environment that runs them, activated or not.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
# A shell ignores SIGINT in its background jobs, and the processes started here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def on_ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """A function, called as `on_ranks(world_size, function, *args)`, that returns the result of each rank."""
    rank_pool.end_crowded_workers()
    return rank_pool.run


@pytest.fixture
def in_own_world(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """Like `on_ranks`, for functions that leave the pool's process group, or collectives in it, unfinished."""

    def run(*args: Any, **options: Any) -> list[Any]:
        rank_pool.renew_world()
        try:
            return rank_pool.run(*args, **options)
        finally:
            rank_pool.renew_world()

    return run


_compilation = pytest.StashKey[Compilation]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes", "which tests to run")
    group.addoption("--lane", choices=LANES, help="default: 5 minutes; full: what CI runs; all: everything")
    group.addoption("--engine", choices=ENGINES, help="what a change to one engine can break; in the lane full")
    group.addoption("--shard", help="such as 1/2: the first of two parts that take equally long")
    group.addoption("--write-times", action="store_true", help="store the times of what runs in tests/times.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.write_times:
        config.pluginmanager.register(TimesWriter(), "times")


@pytest.hookimpl(trylast=True)  # after `-k` and `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of the lane, the engine and the shard; sort those last that wait for DeepSpeed's operators."""
    times, option = Times(), config.option
    if writer := config.pluginmanager.get_plugin("times"):
        writer.existing = set(map(function_of, items))
    # A file or a test that is named runs whole.
    are_named = all("::" in argument or argument.endswith(".py") for argument in config.args)
    lane = option.lane or ("full" if option.engine else "all" if are_named else "default")
    chosen = select(items, lane, times, option.engine)
    if option.shard:
        chosen = shard(chosen, times, option.shard)
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(chosen, key=needs_operators)


def pytest_itemcollected(item: pytest.Item) -> None:
    mark_by_parameters(item)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start to compile the operators of DeepSpeed that tests need. The other tests run meanwhile."""
    if any(map(needs_operators, session.items)) and not session.config.option.collectonly:
        session.config.stash[_compilation] = Compilation()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the compilation if no test waited for it."""
    if _compilation in session.config.stash:
        session.config.stash[_compilation].end()


@pytest.fixture(autouse=True)
def _operators(request: pytest.FixtureRequest) -> None:
    """Wait until the operators are compiled if the test needs them, before ranks with a time limit do."""
    if needs_operators(request.node):
        request.config.stash[_compilation].wait()


class TimesWriter:
    """Stores the seconds of each function, with its fixtures, when the session ends."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._skipped: set[str] = set()
        self.existing: set[str] = set()
        """The functions that were collected."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._skipped.add(report.nodeid)
        if report.when == "call" or MARK not in report.keywords:  # the others may have waited for operators
            self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        by_function: dict[str, list[float]] = {}
        for name, seconds in self._seconds.items():
            if name not in self._skipped:
                by_function.setdefault(name.partition("[")[0], []).append(seconds)
        Times().write(by_function, self.existing)


@contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
    """Undo changes to the environment by fixtures with a wider scope than a test.

    Later tests, the sessions that they start, and the workers of the pool would inherit them. `seed_everything` sets
    `PL_GLOBAL_SEED`, from which every run on several ranks then seeds the generators again.
    """
    with _environment_kept() if fixturedef.scope != "function" else nullcontext():
        return (yield)


@pytest.fixture(autouse=True)
def _environment_restored() -> Iterator[None]:
    """Undo changes to the environment by fits in this test."""
    rank_zero_only.rank = 0  # the constructors of strategies set it to the rank in the environment
    with _environment_kept():
        yield
        release_process_group()  # stays after a fit
        if dist.is_initialized():
            dist.destroy_process_group()  # Lightning's own ddp also leaves one
