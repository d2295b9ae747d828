"""Tell listeners when this rank waits for others in a collective on the host."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_listeners: list["WaitListener"] = []


@dataclass(frozen=True, kw_only=True)
class WaitListener:
    """Functions that are called in the thread that has created this object when it begins and ends to wait."""

    begin: Callable[[], None]
    """Called before a collective."""
    end: Callable[[], None]
    """Called after a collective."""


@contextmanager
def listening(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call functions around the collectives of the current thread that `host_exchange` runs, inside the block."""
    thread = threading.get_ident()

    def only_here(function: Callable[[], None]) -> Callable[[], None]:
        return lambda: function() if threading.get_ident() == thread else None

    listener = WaitListener(begin=only_here(begin), end=only_here(end))
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners[:] = [each for each in _listeners if each is not listener]


@contextmanager
def waiting() -> Iterator[None]:
    """Mark a block in which this rank waits for others."""
    if not _listeners:
        yield
        return
    for listener in _listeners:
        listener.begin()
    try:
        yield
    finally:
        for listener in _listeners:
            listener.end()
