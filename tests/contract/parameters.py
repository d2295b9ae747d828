"""Cases as parameters of tests, with the markers of what they need."""

from typing import Any

import pytest

from tests.contract.case import StrategyCase


def parameter(case: StrategyCase, *others: Any) -> Any:
    """Return the label of `case` and `others` as parameters of a test."""
    return pytest.param(case.label, *others, marks=marks_of(case))


def marks_of(*cases: StrategyCase) -> list[pytest.MarkDecorator]:
    """Return the markers of a test that runs `cases`."""
    operators = {name for case in cases for name in case.operators}
    return [pytest.mark.deepspeed_operators(*operators)] if operators else []
