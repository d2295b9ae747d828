"""Cases as parameters of tests, with the markers of what they need."""

from typing import Any

import pytest

from tests.contract.case import StrategyCase


def parameter(case: StrategyCase, *others: Any, slow: bool = False) -> Any:
    """Return the label of `case` and `others` as parameters of a test, which is marked slow if `slow` is true."""
    return pytest.param(case.label, *others, marks=[*marks_of(case), *([pytest.mark.slow] if slow else [])])


def marks_of(*cases: StrategyCase) -> list[pytest.MarkDecorator]:
    """Return the markers of a test that runs `cases`."""
    marks = [pytest.mark.deepspeed] if any(case.needs_deepspeed for case in cases) else []
    operators = {name for case in cases for name in case.operators}
    return [*marks, pytest.mark.deepspeed_operators(*operators)] if operators else marks
