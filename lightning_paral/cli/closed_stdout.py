"""End a command quietly if the reader of its output closes the pipe, as in `paral inspect CHECKPOINT | head`."""

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_STATUS = 128 + signal.SIGPIPE
"""The status that shells report for a process that SIGPIPE has ended."""


@contextmanager
def exiting_if_stdout_is_closed() -> Iterator[None]:
    """Exit without a traceback, with status 141, if the block writes to stdout and the reader has closed the pipe.

    SIGPIPE stays ignored, as https://docs.python.org/3/library/signal.html#note-on-sigpipe recommends: with its default
    action, a broken network connection would end the process as well.
    """
    try:
        yield
        sys.stdout.flush()  # short output is still in the buffer
    except BrokenPipeError:
        if not _is_stdout_closed():  # a network connection is broken
            raise
        _discard_stdout()
        sys.exit(_STATUS)
    except BaseException:  # such as SystemExit from --help
        flush_or_discard_stdout()
        raise


def flush_or_discard_stdout() -> None:
    """Flush stdout. If its reader has closed the pipe, discard the output, so that Python reports no error at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def _is_stdout_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))


def _discard_stdout() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
