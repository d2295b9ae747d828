"""Only a rank that has passed the point at which another one waits has left out a value."""

import pytest

from lightning_paral.data.logged_steps import LoggedSteps, Part, as_list, cannot_meet, explain_difference, from_list


def parts(events: str) -> list[Part]:
    """Return the parts of a rank. `|` begins a step, `.` the backward pass, and `-` a step of evaluation; `)` ends it.

    A letter reduces a value.
    """
    steps = LoggedSteps()
    for event in events:
        if event == "|":
            steps.begin_step(f"batch {steps.step}")
        elif event == ".":
            steps.begin_part()
        elif event == "-":
            steps.begin_evaluation_step(f"validation batch {steps.step}")
        elif event == ")":
            steps.end_loader("the hooks at the end of the validation")
        else:
            steps.begin_reduction(f"logged '{event}'")
    return from_list(as_list(steps.parts()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("|a", "|"),  # the second is slow
        ("|a.", "|.a"),  # another part, which the fingerprints allow: it has reduced as many
        ("|a" * 3000, "|a" * 1000),
        ("|---)|a", "|----)|"),  # in evaluation, ranks may have different numbers of batches
        ("|----", "|---)"),
    ],
)
def test_slow_rank_has_left_out_nothing(first: str, second: str) -> None:
    assert not cannot_meet(parts(first), parts(second))
    assert not cannot_meet(parts(second), parts(first))


@pytest.mark.parametrize(
    ("first", "second", "where", "what"),
    [
        ("|a", "|.", "batch 0", "rank 0 logged 'a' and rank 1 did not"),
        ("|-a-a", "|-a-)", "validation batch 2", "rank 0 logged 'a' and rank 1 did not"),
        ("|ab", "|b", "batch 0", "rank 0 logged 'a' while rank 1 logged 'b'"),
        ("|", "a|", "the hooks before the first step", "rank 1 logged 'a' and rank 0 did not"),
        ("|a", "|" * 3000, "batch 2999", "is 1 on rank 0; 0 on rank 1"),
    ],
)
def test_rank_that_passed_a_waiting_rank_is_named(first: str, second: str, where: str, what: str) -> None:
    ours, theirs = parts(first), parts(second)

    assert cannot_meet(ours, theirs)
    assert cannot_meet(theirs, ours)
    found = explain_difference({0: ours, 1: theirs})
    assert found[0] == where
    assert what in found[1]
