"""Real processes whose collectives do not match, for which gloo would end one of them without a word."""

import sys

import pytest

from tests.distributed.hangs import mismatched
from tests.launching import TORCHRUN, outputs

UNITS = {
    "paral_fsdp": (
        "the all-gather of FSDP unit `experts.0` (`training_step`, mismatched.py:",
        "FSDP unit `experts.1` (",
    ),
    "paral_zero3": ("the all-gather of ZeRO-3 parameters (`forward`, mismatched.py:",),
}


@pytest.mark.parametrize(
    "by", [(sys.executable,), pytest.param(TORCHRUN, marks=pytest.mark.lane("all"))], ids=["python", "torchrun"]
)
@pytest.mark.parametrize("strategy", ["paral_fsdp", "paral_zero3"])
def test_ranks_that_run_other_units_are_named_with_the_remedy(launch, strategy: str, by: tuple[str, ...]) -> None:
    process = launch("-m", mismatched.__name__, strategy, by=by)

    (printed,) = outputs(process)

    assert process.returncode == 1, printed
    last = next(line for line in reversed(printed.splitlines()) if "ProcessGroupError" in line)
    assert "A rank sent more to another one than its collective takes." in last
    for rank in (0, 1):
        assert f"ank {rank} has waited" in last, last
    assert all(unit in last for unit in UNITS[strategy]), last
    assert "Run a unit without samples on a dummy input" in last
    assert "terminate called" not in printed
