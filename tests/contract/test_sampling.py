"""Under every strategy and at any world size, each sample counts once, and training draws the same global batches."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.contract.cases import BY_LABEL, MAIN, PER_PLACEMENT, with_ranks
from tests.models.judged import SIZES, evaluate, train

WITH_SIZES = [(case.label, size) for case in with_ranks(MAIN) for size in case.world_sizes]
RESUMED = [case.label for case in with_ranks(PER_PLACEMENT, 2)]


@cache
def evaluated_in_one_process() -> dict[str, Any]:
    return evaluate("one process", 1, "batch")


def mean_losses(ranks: list[dict[str, Any]]) -> torch.Tensor:
    """Return the loss of each global batch: the mean over ranks, weighted by their numbers of samples."""
    steps = zip(*(rank["losses"] for rank in ranks), strict=True)
    return torch.tensor([sum(loss * size for loss, size in step) / sum(size for _, size in step) for step in steps])


def assert_evaluation_equals(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Assert that logged values, collected values and predictions equal those of one process.

    Each rank in `ranks` has a different data rank.
    """
    for rank in ranks:
        for ours, theirs in zip(rank["logged"], expected["logged"], strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                assert ours[key] == pytest.approx(value, rel=1e-6, abs=1e-6), key
        for ours, theirs in zip(rank["predictions"], expected["predictions"], strict=True):
            assert [len(batch) for batch in ours] == [len(batch) for batch in theirs]
            torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=0.0, atol=1e-6)
    for index in range(len(SIZES)):
        collected = [value for rank in ranks for value in rank["collected"].get(index, [])]
        assert sorted(collected) == sorted(expected["collected"][index])


@pytest.mark.lane("default")
@pytest.mark.parametrize("split", ["batch", "global"])
@pytest.mark.parametrize(("label", "world_size"), WITH_SIZES)
def test_evaluation_equals_one_process(on_ranks, label: str, split: str, world_size: int) -> None:
    assert_evaluation_equals(on_ranks(world_size, evaluate, label, world_size, split), evaluated_in_one_process())


@pytest.mark.parametrize(
    ("label", "world_size"), [(case.label, case.sizes_among(3, 4, 2)[0]) for case in with_ranks(PER_PLACEMENT, 2)]
)
@pytest.mark.parametrize("split", ["batch", "global"])
def test_padding_batches_leave_no_trace(on_ranks, label: str, world_size: int, split: str) -> None:
    for rank in on_ranks(world_size, evaluate, label, world_size, split):
        num_steps, num_hooks, num_calls = rank["steps"]
        assert num_steps == num_hooks == num_calls
        drawn, expected = rank["generators"]
        assert drawn == expected
        assert rank["states_empty"]


@cache
def trained_in_one_process() -> dict[str, Any]:
    return train("one process", 1, {}, {})


@pytest.mark.lane("default")
@pytest.mark.parametrize(
    ("label", "world_size"), [(case.label, size) for case in with_ranks(MAIN) for size in case.sizes_among(2, 4)]
)
def test_training_on_global_batches_equals_one_process(on_ranks, label: str, world_size: int) -> None:
    expected, tolerance = trained_in_one_process(), BY_LABEL[label].tolerance
    assert len(expected["losses"]) == 10

    ranks = on_ranks(world_size, train, label, world_size, {"split": "global"}, {})

    torch.testing.assert_close(mean_losses(ranks), mean_losses([expected]), rtol=tolerance, atol=0.0)
    for rank in ranks:
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][name], rtol=0.0, atol=tolerance)
        assert rank["metrics"] == pytest.approx(expected["metrics"], abs=tolerance)


@pytest.mark.lane("default")
@pytest.mark.parametrize("split", ["batch", "global"])
@pytest.mark.parametrize("label", RESUMED)
def test_resuming_inside_an_epoch_equals_the_uninterrupted_run(on_ranks, tmp_path, label: str, split: str) -> None:
    path, options = str(tmp_path / "middle.ckpt"), {"split": split}
    uninterrupted = on_ranks(2, train, label, 2, options, {"dropout": 0.2})
    num_steps = len(uninterrupted[0]["losses"])
    saved_at = num_steps // 2 + 1

    on_ranks(2, train, label, 2, options, {"dropout": 0.2, "save_at": (saved_at, path), "max_steps": saved_at})
    resumed = on_ranks(2, train, label, 2, options, {"dropout": 0.2, "ckpt_path": path})

    for ours, expected in zip(resumed, uninterrupted, strict=True):
        assert len(ours["losses"]) == num_steps - saved_at
        assert ours["global_step"] == expected["global_step"]
        torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(expected["losses"][saved_at:]))
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(ours["weights"][name], weight)


@pytest.mark.parametrize(
    ("label", "world_size"),
    [(case.label, size) for case in with_ranks(PER_PLACEMENT, 2) for size in case.sizes_among(1, 4)],
)
def test_resuming_global_batches_at_another_world_size(on_ranks, tmp_path, label: str, world_size: int) -> None:
    path, options = str(tmp_path / "middle.ckpt"), {"split": "global"}
    uninterrupted = on_ranks(2, train, label, 2, options, {})

    on_ranks(2, train, label, 2, options, {"save_at": (7, path), "max_steps": 7})
    resumed = on_ranks(world_size, train, label, world_size, options, {"ckpt_path": path})

    tolerance = BY_LABEL[label].tolerance
    torch.testing.assert_close(mean_losses(resumed), mean_losses(uninterrupted)[7:], rtol=tolerance, atol=0.0)
    for name, weight in uninterrupted[0]["weights"].items():
        torch.testing.assert_close(resumed[0]["weights"][name], weight, rtol=0.0, atol=tolerance)
