"""Signals that are ignored while a run ends."""

import os
import signal

from lightning_paral.distributed.signals import Ignored


def test_signal_is_ignored_and_the_handler_comes_back() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
    try:
        ignored = Ignored(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert received == []
        ignored.restore()
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_process_forked_meanwhile_handles_the_signal_as_before() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        ignored = Ignored(signal.SIGTERM)
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        ignored.restore()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
