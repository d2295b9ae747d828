"""Cases as parameters of tests, marked with what they need."""

from typing import Any

import pytest

from tests.contract.case import StrategyCase


def parameter(case: StrategyCase, *others: Any) -> Any:
    """Return the label of `case`, and `others`, as parameters of a test."""
    return pytest.param(case.label, *others, marks=marks_of(case))


def marks_of(*cases: StrategyCase) -> list[pytest.MarkDecorator]:
    """Return the marks of a test that runs `cases`."""
    marks = [pytest.mark.deepspeed] if any(case.needs_deepspeed for case in cases) else []
    return [*marks, pytest.mark.deepspeed_operators] if any(case.needs_operators for case in cases) else marks
