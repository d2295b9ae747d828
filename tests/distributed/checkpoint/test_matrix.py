"""Every strategy resumes from the checkpoints of every strategy, at any world size, as if training had not stopped."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.case import StrategyCase
from tests.contract.cases import BY_LABEL, CASES
from tests.models.resumable import Losses, assert_continues, fit


def requirement(case: StrategyCase) -> str:
    return "operators" if case.needs_operators else "deepspeed" if case.needs_deepspeed else "torch"


CASES_TO_RESUME = [case for case in CASES if case.resumes_others and case.sizes_among(1, 2, 4)]
GROUPS = ("torch", "deepspeed", "operators")
SOURCES = {group: [case for case in CASES_TO_RESUME if requirement(case) == group] for group in GROUPS}
"""The cases that save, by what they need. A test resumes from the checkpoints of all of a group."""


def num_processes(case: StrategyCase, size: int) -> int:
    return size if case.has_ranks else 1


def save(folder: str, label: str, size: int) -> Losses:
    return fit(BY_LABEL[label].strategy(), size, save_to=f"{folder}/{label}").losses


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[StrategyCase], tuple[str, list[Losses]]]:
    """A function that saves in the middle of an epoch, on 2 ranks if the case runs with 2.

    It returns the path and the losses of the run, which was not interrupted.
    """
    folder, ranks = str(tmp_path_factory.mktemp("matrix")), {}

    def saved_under(case: StrategyCase) -> tuple[str, list[Losses]]:
        if case.label not in ranks:
            size = case.sizes_among(2, 4, 1)[0]
            ranks[case.label] = rank_pool.run(num_processes(case, size), save, folder, case.label, size)
        return f"{folder}/{case.label}", ranks[case.label]

    return saved_under


def resume_from(paths: list[str], target: str, world_size: int) -> list[Losses]:
    return [fit(BY_LABEL[target].strategy(), world_size, resume_from=path).losses for path in paths]


def operators_of(*cases: StrategyCase) -> list[pytest.MarkDecorator]:
    names = {name for case in cases for name in case.operators}
    return [pytest.mark.deepspeed_operators(*names)] if names else []


def parameters() -> list[Any]:
    """Return each group of sources with each target at each of its sizes."""
    return [
        pytest.param(group, target.label, size, marks=operators_of(target, *sources))
        for target in CASES_TO_RESUME
        for group, sources in SOURCES.items()
        for size in target.sizes_among(1, 2, 4)
    ]


@pytest.mark.lane("default")
@pytest.mark.parametrize(("sources", "target", "size"), parameters())
def test_resuming_continues_with_the_losses_of_the_uninterrupted_run(
    on_ranks, saved, sources: str, target: str, size: int
) -> None:
    runs = [(case, *saved(case)) for case in SOURCES[sources]]
    paths = [path for _, path, _ in runs]
    ranks = on_ranks(num_processes(BY_LABEL[target], size), resume_from, paths, target, size, timeout=300)
    for number, (source, _, whole) in enumerate(runs):
        tolerance = max(source.tolerance, BY_LABEL[target].tolerance)
        assert_continues([losses[number] for losses in ranks], whole, tolerance, source.label)
