"""How processes end after a run that failed or was preempted, if user code handles the error or takes its time."""

import pytest

from tests.launching import outputs

SCRIPT = ("-m", "tests.distributed.launch.ending_script")


@pytest.mark.parametrize("part", ["handled", "raising hook"])
def test_ranks_that_handle_the_error_end_in_their_own_time(launch, part: str) -> None:
    process = launch(*SCRIPT, part)
    (printed,) = outputs(process)

    assert process.returncode == 0, printed
    # Nothing of the run is left that could end the process later, also if Lightning skipped the teardown.
    assert sorted(line for line in printed.splitlines() if "handled" in line) == [
        "rank 0: handled, []",
        "rank 1: handled, []",
    ]


@pytest.mark.parametrize(
    "program", [SCRIPT, ("-c", "from tests.distributed.launch import ending_script as e; e.main()")]
)
def test_the_cause_is_printed_once_if_the_failed_rank_takes_long_to_end(launch, program: tuple[str, ...]) -> None:
    process = launch(*program, "slow hook")
    (printed,) = outputs(process)

    assert process.returncode == 1
    assert printed.count('raise ValueError("my bug")') == 1, printed
    assert "ValueError: my bug" in "".join(printed.splitlines()[-6:]), printed
