"""Under every strategy, at any world size: every sample counts once, and training draws what one process draws."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.contract.cases import MAIN, PER_PLACEMENT, labels, with_ranks
from tests.models.judged import SIZES, evaluate, train

LABELS = labels(with_ranks(MAIN))
RESUMED = labels(with_ranks(PER_PLACEMENT))


@cache
def evaluated_in_one_process() -> dict[str, Any]:
    return evaluate("one process", 1, "batch")


def mean_losses(ranks: list[dict[str, Any]]) -> torch.Tensor:
    """The loss of each global batch: the mean over ranks, weighted by what they had of it."""
    steps = zip(*(rank["losses"] for rank in ranks), strict=True)
    return torch.tensor([sum(loss * size for loss, size in step) / sum(size for _, size in step) for step in steps])


def assert_evaluation_equals(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Compare what the ranks, each with a data rank of its own, logged, collected and predicted with one process."""
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("split", ["batch", "global"])
@pytest.mark.parametrize("label", LABELS)
def test_evaluation_equals_one_process(on_ranks, label: str, split: str, world_size: int) -> None:
    assert_evaluation_equals(on_ranks(world_size, evaluate, label, world_size, split), evaluated_in_one_process())


@pytest.mark.parametrize("label", RESUMED)
def test_padding_batches_leave_no_trace(on_ranks, label: str) -> None:
    for rank in on_ranks(3, evaluate, label, 3, "batch"):
        num_steps, num_hooks, num_calls = rank["steps"]
        assert num_steps == num_hooks == num_calls
        drawn, expected = rank["generators"]
        assert drawn == expected
        assert rank["states_empty"]


@pytest.mark.parametrize("label", LABELS)
def test_training_on_global_batches_is_the_same_run_at_any_world_size(on_ranks, label: str) -> None:
    (expected,) = on_ranks(1, train, "paral_ddp", 1, {"split": "global"}, {})
    assert len(expected["losses"]) == 10

    for world_size in (2, 4):
        ranks = on_ranks(world_size, train, label, world_size, {"split": "global"}, {})

        torch.testing.assert_close(mean_losses(ranks), mean_losses([expected]), rtol=1e-5, atol=0.0)
        for rank in ranks:
            for name, weight in rank["weights"].items():
                torch.testing.assert_close(weight, expected["weights"][name], rtol=0.0, atol=1e-5)
            assert rank["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)


@pytest.mark.parametrize("split", ["batch", "global"])
@pytest.mark.parametrize("label", RESUMED)
def test_resuming_inside_an_epoch_equals_the_uninterrupted_run(on_ranks, tmp_path, label: str, split: str) -> None:
    path, options = str(tmp_path / "middle.ckpt"), {"split": split}
    whole = on_ranks(2, train, label, 2, options, {"dropout": 0.2})
    num_steps = len(whole[0]["losses"])
    saved_at = num_steps // 2 + 1

    on_ranks(2, train, label, 2, options, {"dropout": 0.2, "save_at": (saved_at, path), "max_steps": saved_at})
    resumed = on_ranks(2, train, label, 2, options, {"dropout": 0.2, "ckpt_path": path})

    for ours, expected in zip(resumed, whole, strict=True):
        assert len(ours["losses"]) == num_steps - saved_at
        assert ours["global_step"] == expected["global_step"]
        torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(expected["losses"][saved_at:]))
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(ours["weights"][name], weight)


@pytest.mark.parametrize("label", RESUMED)
@pytest.mark.parametrize("world_size", [1, 4])
def test_resuming_global_batches_at_another_world_size(on_ranks, tmp_path, label: str, world_size: int) -> None:
    path, options = str(tmp_path / "middle.ckpt"), {"split": "global"}
    whole = on_ranks(2, train, label, 2, options, {})

    on_ranks(2, train, label, 2, options, {"save_at": (7, path), "max_steps": 7})
    resumed = on_ranks(world_size, train, label, world_size, options, {"ckpt_path": path})

    torch.testing.assert_close(mean_losses(resumed), mean_losses(whole)[7:], rtol=1e-5, atol=0.0)
    for name, weight in whole[0]["weights"].items():
        torch.testing.assert_close(resumed[0]["weights"][name], weight, rtol=0.0, atol=1e-5)
