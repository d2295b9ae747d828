"""What any strategy saves, every strategy loads, at any world size: training goes on as if it had not stopped."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.contract.case import StrategyCase
from tests.contract.cases import BY_LABEL, CASES
from tests.contract.parameters import marks_of
from tests.models.resumable import NUM_BATCHES, SAVED_AFTER, fit, mean_losses

Losses = dict[int, float]


def needs(case: StrategyCase) -> str:
    return "operators" if case.needs_operators else "deepspeed" if case.needs_deepspeed else "torch"


TARGETS = [case for case in CASES if case.resumes_others]
SOURCES = {need: [case for case in TARGETS if needs(case) == need] for need in ("torch", "deepspeed", "operators")}
"""The strategies that save, by what they need. A fit is short, so a test resumes from all of a kind."""


def save(folder: str, label: str) -> Losses:
    return fit(BY_LABEL[label].strategy(), 2, save_to=f"{folder}/{label}").losses


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[StrategyCase], tuple[str, Losses]]:
    """Saves in the middle of an epoch at 2 ranks; returns where, and the losses of the run, which went on."""
    folder, losses = str(tmp_path_factory.mktemp("matrix")), {}

    def saved_under(case: StrategyCase) -> tuple[str, Losses]:
        if case.label not in losses:
            losses[case.label] = mean_losses(rank_pool.run(2 if case.has_ranks else 1, save, folder, case.label))
        return f"{folder}/{case.label}", losses[case.label]

    return saved_under


def resume_from(paths: list[str], target: str, world_size: int) -> list[Losses]:
    return [fit(BY_LABEL[target].strategy(), world_size, resume_from=path).losses for path in paths]


def parameters() -> list[Any]:
    """Return each kind of sources with each target."""
    return [
        pytest.param(kind, target.label, marks=marks_of(target, *sources))
        for target in TARGETS
        for kind, sources in SOURCES.items()
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("sources", "target"), parameters())
def test_resuming_goes_on_with_the_losses_of_the_uninterrupted_run(
    on_ranks, saved, sources: str, target: str, world_size: int
) -> None:
    runs = [(case, *saved(case)) for case in SOURCES[sources]]
    num_processes = world_size if BY_LABEL[target].has_ranks else 1
    ranks = on_ranks(num_processes, resume_from, [path for _, path, _ in runs], target, world_size, timeout=300)
    for number, (source, _, expected) in enumerate(runs):
        found = mean_losses([losses[number] for losses in ranks])
        assert list(found) == list(range(SAVED_AFTER, NUM_BATCHES))
        tolerance = max(source.tolerance, BY_LABEL[target].tolerance)
        for batch, loss in found.items():
            assert loss == pytest.approx(expected[batch], rel=tolerance), f"{source.label}, batch {batch}"
