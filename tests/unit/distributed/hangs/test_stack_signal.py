"""SIGUSR2 is noticed while the main thread is in C code, and belongs to the user if they handle it."""

import faulthandler
import os
import signal
import tempfile
import threading
from collections.abc import Iterator

import pytest

from lightning_paral.distributed.hangs.stack_signal import call_on_stack_signal


@pytest.fixture(autouse=True)
def unhandled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR2, before)


def test_signal_is_noticed_while_the_main_thread_is_in_c_code() -> None:
    lock = threading.Lock()
    lock.acquire()
    undo = call_on_stack_signal(lock.release)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    assert lock.acquire(timeout=60)  # in C, in which no handler of Python's `signal` runs
    timer.join()
    undo()

    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_handler_of_the_user_is_left_alone() -> None:
    arrived: list[int] = []
    signal.signal(signal.SIGUSR2, handler := lambda *_: arrived.append(1))

    call_on_stack_signal(lambda: arrived.append(2))()
    os.kill(os.getpid(), signal.SIGUSR2)

    assert (signal.getsignal(signal.SIGUSR2), arrived) == (handler, [1])


def test_handler_that_is_not_of_python_is_left_alone() -> None:
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        try:
            call_on_stack_signal(lambda: None)
            assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
        finally:
            faulthandler.unregister(signal.SIGUSR2)


def test_handler_that_the_user_sets_during_the_run_is_kept() -> None:
    arrived = []
    undo = call_on_stack_signal(lambda: None)
    signal.signal(signal.SIGUSR2, lambda *_: arrived.append(1))
    undo()

    os.kill(os.getpid(), signal.SIGUSR2)

    assert arrived == [1]
