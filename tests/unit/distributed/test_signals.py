"""Signals that are ignored while a run ends."""

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
