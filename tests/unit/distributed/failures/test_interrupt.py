"""The signal by which the watcher interrupts the main thread, over several runs."""

import signal
import threading

import pytest

from lightning_paral.distributed.failures.failure import InterruptedByFailure
from lightning_paral.distributed.failures.interrupt import Interrupt

SIGNUM = signal.SIGRTMIN + 7


def own_handler(signum: int, frame: object) -> None:
    pass


def test_each_run_is_interrupted_and_the_handler_of_the_user_comes_back() -> None:
    before = signal.signal(SIGNUM, own_handler)
    try:
        for number in range(3):
            interrupt = Interrupt()
            installed = signal.getsignal(SIGNUM)
            with pytest.raises(InterruptedByFailure, match=f"rank 1 failed in run {number}"):
                interrupt.send(threading.get_ident(), f"rank 1 failed in run {number}")
            interrupt.end()
            assert signal.getsignal(SIGNUM) is own_handler
            signal.signal(SIGNUM, installed)  # as Lightning does after its teardown
            signal.raise_signal(SIGNUM)  # nothing happens
        last = Interrupt()
        last.end()
        assert signal.getsignal(SIGNUM) is own_handler
    finally:
        signal.signal(SIGNUM, before)


def test_a_rank_that_has_left_the_run_is_not_interrupted() -> None:
    interrupt = Interrupt()
    interrupt.stop()
    interrupt.send(threading.get_ident(), "rank 1 failed")
    interrupt.end()
