"""Only a rank that has passed the point at which another one waits has left out a value."""

import pytest

from lightning_paral.data.logged_agreement import LoggedHistory, Record, find_difference


def record(events: str) -> Record:
    """Return the record of a rank. `|` begins a step, `.` the next part of it, `-` a step of evaluation; `)` ends it.

    A letter reduces a value.
    """
    history, num_steps = LoggedHistory(), 0
    for event in events:
        num_steps += event in "|-"
        if event in "|.)":
            history.begin_part({"|": f"batch {num_steps}", ".": None, ")": "the end of the validation"}[event])
        elif event == "-":
            history.begin_evaluation_step(f"validation batch {num_steps}")
        else:
            with history.reducing(f"logged '{event}'"):
                pass
    return Record.from_json(history.record().to_json())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("|a", "|"),  # the second is slow
        ("|ab", "|a"),
        ("|a" * 3000, "|a" * 1000),
        ("|a" * 100 + "|", "|a" * 100),
        ("|---)|a", "|----)|"),  # in evaluation, ranks may have different numbers of batches
        ("|----", "|---)"),
    ],
)
def test_slow_rank_has_left_out_nothing(first: str, second: str) -> None:
    assert find_difference({0: record(first), 1: record(second)}) is None
    assert find_difference({0: record(second), 1: record(first)}) is None


@pytest.mark.parametrize(
    ("first", "second", "where", "what"),
    [
        ("|a", "|.", "batch 1", "rank 0 logged 'a' and rank 1 did not"),
        ("|a.", "|.a", "batch 1", "rank 0 logged 'a' and rank 1 did not"),
        ("|-a-a", "|-a-)", "validation batch 3", "rank 0 logged 'a' and rank 1 did not"),
        ("|ab", "|b", "batch 1", "rank 0 logged 'a' and rank 1 logged 'b'"),
        ("|", "a|", "the hooks before the first step", "rank 1 logged 'a' and rank 0 did not"),
        ("|a", "|" * 3000, "batch 1", "rank 0 logged 'a' and rank 1 did not"),
        ("|a" * 100 + "|ab", "|a" * 101 + ".", "batch 101", "rank 0 logged 'b' and rank 1 did not"),
    ],
)
def test_rank_that_passed_a_waiting_rank_is_named(first: str, second: str, where: str, what: str) -> None:
    assert find_difference({0: record(first), 1: record(second)}) == (where, what)
    assert find_difference({1: record(second), 0: record(first)}) == (where, what)
