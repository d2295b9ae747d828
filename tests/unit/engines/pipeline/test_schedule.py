"""The order of the passes is that of the papers, and no order can block."""

import pytest

from lightning_paral.engines.pipeline.schedule import Pass, Schedule, idle_fraction, passes_of_step


def both(schedule: Schedule, num_stages: int, num_micro_batches: int) -> list[list[Pass]]:
    return [passes_of_step(schedule, stage, num_stages, num_micro_batches) for stage in range(num_stages)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 8])
def test_every_pass_runs_once_after_those_that_it_needs(
    schedule: Schedule, num_stages: int, num_micro_batches: int
) -> None:
    """Run the stages side by side: a pass waits for the same one of a neighboring stage."""
    remaining = both(schedule, num_stages, num_micro_batches)
    done: set[tuple[int, Pass]] = set()
    ticks = 0
    while any(remaining):
        ready = [
            (stage, passes[0])
            for stage, passes in enumerate(remaining)
            if passes and is_ready(stage, passes[0], num_stages, done)
        ]
        assert ready, "all stages wait for each other"
        for stage, _ in ready:
            remaining[stage].pop(0)
        done.update(ready)
        ticks += 1

    assert len(done) == 2 * num_stages * num_micro_batches
    assert ticks == 2 * (num_micro_batches + num_stages - 1)
    idle = 1 - 2 * num_micro_batches / ticks
    assert idle == pytest.approx(idle_fraction(num_stages, num_micro_batches))


def is_ready(stage: int, each: Pass, num_stages: int, done: set[tuple[int, Pass]]) -> bool:
    if each.direction == "forward":
        return stage == 0 or (stage - 1, each) in done
    after = (stage + 1, each) if stage + 1 < num_stages else (stage, Pass("forward", each.micro_batch))
    return after in done


@pytest.mark.parametrize(("schedule", "largest"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])])
def test_activations_of_as_many_micro_batches_are_kept(schedule: Schedule, largest: list[int]) -> None:
    found = []
    for passes in both(schedule, 4, 8):
        kept = [0]
        for each in passes:
            kept.append(kept[-1] + (1 if each.direction == "forward" else -1))
        found.append(max(kept))
    assert found == largest
