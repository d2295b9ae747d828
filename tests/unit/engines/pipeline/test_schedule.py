"""The order of the passes is that of the papers, and no order can block."""

import pytest

from lightning_paral.engines.pipeline.schedule import Pass, Schedule, idle_fraction, passes_of_step

KINDS: list[tuple[Schedule, int]] = [
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved", 1),
    ("interleaved", 2),
    ("interleaved", 3),
]


def table(schedule: Schedule, num_stages: int, num_micro_batches: int, per_stage: int) -> list[list[Pass]]:
    return [passes_of_step(schedule, stage, num_stages, num_micro_batches, per_stage) for stage in range(num_stages)]


@pytest.mark.parametrize(("schedule", "per_stage"), KINDS)
@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5, 8, 9])
def test_every_pass_runs_once_after_those_that_it_needs(
    schedule: Schedule, per_stage: int, num_stages: int, num_micro_batches: int
) -> None:
    """Run the stages side by side: a pass waits for the same one of a neighboring part."""
    remaining = table(schedule, num_stages, num_micro_batches, per_stage)
    num_parts = num_stages * per_stage
    done: set[Pass] = set()
    ticks = 0
    while any(remaining):
        ready = [passes[0] for passes in remaining if passes and is_ready(passes[0], num_parts, done)]
        assert ready, "all stages wait for each other"
        for each in ready:
            assert remaining[each.part % num_stages].pop(0) == each
        done.update(ready)
        ticks += 1

    assert len(done) == 2 * num_parts * num_micro_batches
    idle = 1 - 2 * num_micro_batches * per_stage / ticks
    assert idle == pytest.approx(idle_fraction(num_stages, num_micro_batches, per_stage))


def is_ready(each: Pass, num_parts: int, done: set[Pass]) -> bool:
    if each.direction == "forward":
        return each.part == 0 or Pass("forward", each.micro_batch, each.part - 1) in done
    if each.part == num_parts - 1:
        return Pass("forward", each.micro_batch, each.part) in done
    return Pass("backward", each.micro_batch, each.part + 1) in done


@pytest.mark.parametrize("num_micro_batches", [1, 5, 8])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_stages_have_the_passes_between_them_in_the_same_order(direction: str, num_micro_batches: int) -> None:
    """NCCL matches messages by their order."""
    ranks = table("interleaved", 3, num_micro_batches, 3)
    for sender, receiver in ((0, 1), (1, 2), (2, 0)):
        sent, received = (
            [(each.micro_batch, each.part + after) for each in ranks[rank] if each.direction == direction]
            for rank, after in ((sender, 1), (receiver, 0))
        )
        assert [each for each in sent if each[1] < 9] == [each for each in received if each[1] > 0]


@pytest.mark.parametrize(
    ("schedule", "per_stage", "largest"),
    [("1f1b", 1, [4, 3, 2, 1]), ("gpipe", 1, [8, 8, 8, 8]), ("interleaved", 2, [11, 9, 7, 5])],
)
def test_activations_of_as_many_passes_are_kept(schedule: Schedule, per_stage: int, largest: list[int]) -> None:
    found = []
    for passes in table(schedule, 4, 8, per_stage):
        kept = [0]
        for each in passes:
            kept.append(kept[-1] + (1 if each.direction == "forward" else -1))
        found.append(max(kept))
    assert found == largest


def test_interleaving_has_the_order_of_the_paper() -> None:
    """Narayanan et al., arXiv:2104.04473, figure 4: two stages of two parts, four micro-batches."""
    first, _ = table("interleaved", 2, 4, 2)

    order = [f"{each.direction[0]}{each.micro_batch}.{each.part}" for each in first]
    assert " ".join(order) == "f0.0 f1.0 f0.2 f1.2 f2.0 b0.2 f3.0 b1.2 f2.2 b0.0 f3.2 b1.0 b2.2 b3.2 b2.0 b3.0"
