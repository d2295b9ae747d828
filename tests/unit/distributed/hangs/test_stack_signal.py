"""SIGUSR2 is noticed while the main thread is in C code, and belongs to the user if they handle it."""

import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_paral.distributed.hangs.stack_signal import StackSignal


@pytest.fixture(autouse=True)
def unhandled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR2, before)


def test_signal_is_noticed_while_the_main_thread_is_in_c_code() -> None:
    taken = StackSignal()
    noticed: list[float] = []

    def notice() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR2)
        while not taken.has_arrived():
            time.sleep(0.01)
        noticed.append(time.monotonic())
        lock.release()

    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=notice)
    thread.start()
    assert lock.acquire(timeout=60)  # in C, in which no handler of Python's `signal` runs
    thread.join()
    taken.release()

    assert noticed
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_handler_of_the_user_is_left_alone() -> None:
    arrived = []
    signal.signal(signal.SIGUSR2, lambda *_: arrived.append(1))

    taken = StackSignal()
    os.kill(os.getpid(), signal.SIGUSR2)
    taken.release()

    assert (taken.is_taken, arrived) == (False, [1])


def test_handler_that_is_not_of_python_is_left_alone() -> None:
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        try:
            assert not StackSignal().is_taken
        finally:
            faulthandler.unregister(signal.SIGUSR2)


def test_handler_that_the_user_sets_during_the_run_is_kept() -> None:
    arrived = []
    taken = StackSignal()
    signal.signal(signal.SIGUSR2, lambda *_: arrived.append(1))
    taken.release()

    os.kill(os.getpid(), signal.SIGUSR2)

    assert arrived == [1]
