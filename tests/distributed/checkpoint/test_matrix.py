"""What any strategy saves, every strategy loads, at any world size: training goes on as if it had not stopped."""

from pathlib import Path

import pytest

from tests.models.resumable import NUM_BATCHES, SAVED_AFTER, STRATEGIES, fit, mean_losses, with_cpu_adam

pytestmark = pytest.mark.usefixtures("deepspeed_operators")


def save_under(folder: str, labels: list[str]) -> dict[str, dict[int, float]]:
    return {label: fit(STRATEGIES[label](), 2, save_to=f"{folder}/{label}").losses for label in labels}


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[int, float]]]:
    """Checkpoints saved in the midst of an epoch on 2 ranks, by strategy, and the losses of the runs that went on."""
    folder = tmp_path_factory.mktemp("matrix")
    others = [label for label in STRATEGIES if label != "dp"]
    ranks = rank_pool.run(2, save_under, str(folder), others, timeout=300)
    (process,) = rank_pool.run(1, save_under, str(folder), ["dp"])  # two threads
    return folder, process | {label: mean_losses([losses[label] for losses in ranks]) for label in others}


def resume_from_all(folder: str, target: str, world_size: int) -> dict[str, dict[int, float]]:
    return {
        source: fit(STRATEGIES[target](), world_size, resume_from=f"{folder}/{source}").losses for source in STRATEGIES
    }


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("target", STRATEGIES)
def test_resuming_goes_on_with_the_losses_of_the_uninterrupted_run(
    on_ranks, saved, target: str, world_size: int
) -> None:
    folder, uninterrupted = saved
    num_processes = 1 if target == "dp" else world_size
    ranks = on_ranks(num_processes, resume_from_all, str(folder), target, world_size, timeout=300)
    for source, expected in uninterrupted.items():
        found = mean_losses([losses[source] for losses in ranks])
        assert list(found) == list(range(SAVED_AFTER, NUM_BATCHES))
        tolerance = 1e-4 if with_cpu_adam(source) or with_cpu_adam(target) else 1e-5
        for number, loss in found.items():
            assert loss == pytest.approx(expected[number], rel=tolerance), f"{source}, batch {number}"
