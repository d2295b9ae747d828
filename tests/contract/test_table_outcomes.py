"""How a table judges errors, compares results, and keeps outcomes on its page."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.tables import page
from tests.contract.tables.comparing import differences
from tests.contract.tables.outcomes import Raised, judged
from tests.contract.tables.run import Mean, OfEach, OfRankZero
from tests.contract.user_code.table import TABLE


@pytest.mark.parametrize(
    ("message", "is_ours", "kind"),
    [
        ("The head is sharded.", True, "refused"),
        ("The head cannot be set. Reworded.", True, "refused"),
        ("The backbone is sharded.", True, "fails"),
        ("shape mismatch in head", False, "fails"),
        ("The head is sharded.\ntorch: shape mismatch", False, "refused"),
    ],
)
def test_refusal_names_the_thing_and_is_an_error_of_this_package(message: str, is_ours: bool, kind: str) -> None:
    assert judged("head", [Raised("E", message, is_ours, "")], 1, TABLE.clear).kind == kind


def test_error_of_some_ranks_is_a_defect() -> None:
    assert judged("", [Raised("E", "The head is sharded.", True, "")], 2, ()).kind == "fails"


@pytest.mark.parametrize(
    ("ranks", "expected", "num_different"),
    [
        ([Mean([1.0]), Mean([3.0])], [Mean([2.0])], 0),
        ([Mean([1.0]), Mean([3.0, 4.0])], [Mean([2.0])], 1),
        ([Mean({"a": 1.0}), Mean({})], [Mean({"a": 1.0})], 0),
        ([OfRankZero(1), OfRankZero(2)], [OfRankZero(1)], 0),
        ([OfEach(1), OfEach(2)], [OfEach(1)], 1),
        ([OfEach(1), OfEach(2)], [OfEach(1), OfEach(3)], 0),
        ([1, 2], [1, 3], 1),
        ([float("nan")], [0.0], 1),
    ],
)
def test_results_of_ranks_are_compared_by_their_kind(
    ranks: list[object], expected: list[object], num_different: int
) -> None:
    found = differences([{"x": value} for value in ranks], [{"x": value} for value in expected], 1e-5)

    assert len(list(found)) == num_different


def test_page_keeps_the_outcomes_it_is_written_from(tmp_path: Path) -> None:
    outcomes = page.read(TABLE)
    copy = replace(TABLE, page=tmp_path / "page.md")

    page.write(copy, outcomes)

    assert page.read(copy) == outcomes
