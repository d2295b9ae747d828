"""Runs whose ranks fail show the cause, end with an error status, and leave no process."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.distributed.faults.cases import CASES, Case
from tests.distributed.faults.runs import Result, count_tracebacks, run, stopping

SECONDS = 30
"""How long a run may take to end. It takes a few seconds on a machine that is not busy."""


@pytest.fixture(scope="module")
def results() -> Iterator[dict[Case, "Future[Result]"]]:
    """The ends of all cases, two of which run at a time."""
    stopping.clear()
    with ThreadPoolExecutor(2) as pool:
        yield {case: pool.submit(run, case) for case in CASES}
        stopping.set()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_end_of_a_run_with_a_fault(results: dict[Case, "Future[Result]"], case: Case) -> None:
    result = results[case].result(timeout=600)

    assert not result.faults(SECONDS), result.output


def test_traceback_that_a_rank_prints_counts_each_time_but_not_one_that_a_message_quotes() -> None:
    line = 'raise TypoError(f"the typo of rank {RANK}")'
    traceback = f'[rank1]:   File "failing.py", line 76, in fail\n[rank1]:     {line}\n[rank1]: TypoError: the typo\n'
    quotation = f'[rank0]: Rank 0 ended because rank 1 failed: File "failing.py", line 76, in fail {line}\n'

    assert count_tracebacks(quotation) == 0
    assert count_tracebacks(traceback + quotation) == 1
    assert count_tracebacks(traceback + traceback.replace("[rank1]: ", "")) == 2
