"""After some ranks have failed or died, the others save the last completed step if they have everything."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import outputs


@pytest.fixture
def fail(launch, tmp_path: Path) -> Any:
    """A function that lets runs fail one after another, and returns what `survived.py` told of each."""

    def run(*faults: dict[str, Any]) -> list[dict[str, Any]]:
        process = launch("-m", "tests.distributed.checkpoint.survived", str(tmp_path), *map(json.dumps, faults))
        (printed,) = outputs(process)
        assert process.returncode == 0, printed[-3000:]
        told = [json.loads(line) for line in printed.splitlines() if line.startswith('{"saved')]
        assert len(told) == len(faults)
        return told

    return run


def warned(told: dict[str, Any]) -> str:
    """Return the only warning about saving."""
    (warning,) = [
        line for of_rank in told["warnings"] for line in of_rank if "could not save" in line or "alone" in line
    ]
    assert "\n" not in warning
    return warning


def test_replicas_that_live_save_the_last_completed_step(fail) -> None:
    ddp = {"strategy": "paral_ddp", "world_size": 2, "ranks": [1]}
    forward, second_of_window, in_update, rank_0, epoch, in_background = fail(
        ddp,
        ddp | {"batch": 7, "form": "sharded"},
        ddp | {"batch": 7, "where": "inside update"},
        {"strategy": "paral_ddp", "world_size": 3, "ranks": [0], "batch": 9, "where": "batch end"},
        ddp | {"batch": 0, "epoch": 1},
        ddp | {"batch": 7, "options": {"async_save": True}},
    )

    assert forward["saved"] == second_of_window["saved"] == ["failed-step=3.ckpt"]
    assert forward["first"] == second_of_window["first"] == [0, 6], "a window of accumulation begins at batch 6"
    assert in_update["first"] == [0, 8], "rank 0 completed the step in which rank 1 died"
    assert rank_0["first"] == epoch["first"] == [1, 0]
    assert in_background["saved"] == ["step=3.ckpt"]
    for told in (forward, second_of_window, in_update, rank_0, epoch, in_background):
        assert told["resumed"], "losses of the resumed run differ"
    assert "by rank 0 alone: rank 1 of 2 ended" in warned(forward)
    assert "The random states of rank 1 are unknown; it has those of rank 0" in warned(forward)
    assert "by ranks 1, 2 alone: rank 0 of 3 ended" in warned(rank_0)


def test_exceptions_let_all_ranks_save_that_are_at_the_same_step(fail) -> None:
    raising = {"strategy": "paral_ddp", "kill": False}
    alone, in_update, together, last_batch, sharded = fail(
        raising | {"world_size": 3, "ranks": [1]},
        raising | {"world_size": 2, "ranks": [1], "batch": 7, "where": "inside update"},
        raising | {"world_size": 2, "ranks": [0, 1], "batch": 0, "epoch": 1},
        raising | {"world_size": 2, "ranks": [0, 1], "batch": 9},
        raising | {"strategy": "paral_fsdp", "world_size": 2, "ranks": [1], "batch": 7},
    )

    assert alone["first"] == [0, 6], alone
    assert in_update["first"] == [0, 8]
    assert together["first"] == [1, 0]
    assert last_batch["first"] == [0, 8]
    assert sharded["first"] == [0, 6]
    for told in (alone, in_update, together, last_batch, sharded):
        assert told["resumed"], "losses of the resumed run differ"
    assert "rank 1: inside the optimizer step after step 3" in warned(in_update)


def test_hybrid_sharding_saves_while_each_shard_has_a_rank_that_lives(fail) -> None:
    hybrid = {"strategy": "fsdp_hybrid", "world_size": 4}
    one, two, in_update, shard_gone = fail(
        hybrid | {"ranks": [0], "batch": 7, "where": "backward"},
        hybrid | {"ranks": [1, 2], "form": "full"},
        hybrid | {"ranks": [3], "batch": 7, "where": "inside update", "kill": False},
        hybrid | {"ranks": [0, 2]},
    )

    assert one["resumed"]
    assert two["resumed"]
    assert in_update["resumed"]
    assert shard_gone["saved"] == []
    assert "no rank that could save has the shards of ranks 0, 2." in warned(shard_gone)


def test_shards_without_replicas_are_named(fail) -> None:
    fsdp, zero2, zero3, weights = fail(
        {"strategy": "paral_fsdp", "world_size": 2, "ranks": [1]},
        {"strategy": "paral_zero2", "world_size": 2, "ranks": [1]},
        {"strategy": "paral_zero3", "world_size": 2, "ranks": [0], "batch": 7},
        {"strategy": "paral_zero1", "world_size": 2, "ranks": [1], "weights_only": True},
    )

    for told, rank in ((fsdp, 1), (zero2, 1), (zero3, 0)):
        assert told["saved"] == []
        assert f"no rank that could save has the shards of rank {rank}." in warned(told)
    assert weights["saved"] == ["failed-step=3.ckpt"], "without its optimizer, every rank has all weights"
