"""SIGUSR2 is noticed while the main thread is in C code, and belongs to the user if they handle it."""

import os
import signal
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


def test_signal_is_noticed_in_a_later_run_although_lightning_restores_the_handler_of_the_one_before() -> None:
    undo = call_on_stack_signal(lambda: None)
    kept = signal.getsignal(signal.SIGUSR2)
    undo()
    signal.signal(signal.SIGUSR2, kept)  # as Lightning does when a fit has ended
    arrived = threading.Event()

    undo = call_on_stack_signal(arrived.set)
    os.kill(os.getpid(), signal.SIGUSR2)

    assert arrived.wait(timeout=60)
    undo()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_handler_of_the_user_is_left_alone() -> None:
    arrived: list[int] = []
    signal.signal(signal.SIGUSR2, handler := lambda *_: arrived.append(1))

    call_on_stack_signal(lambda: arrived.append(2))()
    os.kill(os.getpid(), signal.SIGUSR2)

    assert (signal.getsignal(signal.SIGUSR2), arrived) == (handler, [1])
