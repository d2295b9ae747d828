"""Report uncaught errors of this package briefly: the user's own lines and the message, once per node."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

from lightning_paral.distributed.failures.failure import PRINT_SECONDS, FirstFailure, failure_of, first_failure_of
from lightning_paral.distributed.failures.torchrun_report import tell_torchrun
from lightning_paral.distributed.hangs.user_frames import library_of
from lightning_paral.distributed.process_group import is_first_to_report
from lightning_paral.errors import ParalError, RankFailedError

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

TRACEBACK_VARIABLE = "PARAL_TRACEBACK"
"""The environment variable that restores complete tracebacks if its value is `full`."""


def install_brief_excepthook() -> None:
    """Print uncaught errors of this package without the frames of libraries.

    If several ranks of a node fail with the same error, one of them prints it. All other errors are printed in full,
    and so is an error of this package that was caused by an error in user code, such as a training step.
    """
    if not isinstance(sys.excepthook, _BriefExceptHook):
        sys.excepthook = _BriefExceptHook(sys.excepthook)


class _BriefExceptHook:
    def __init__(self, otherwise: Hook) -> None:
        self._otherwise = otherwise

    def __call__(self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        first = first_failure_of(error)
        if first is None or first.is_own:
            tell_torchrun(error)
        if first is None or first.known is None:
            self._print(error_type, error, trace)
        elif first.is_own:
            self._print(error_type, error, trace)
            sys.stderr.flush()
            first.set_printed()
        else:
            self._print_after_first(first, error_type, error, trace)

    def _print_after_first(
        self,
        first: FirstFailure,
        error_type: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Print the error of a rank that did not fail first, in one line if it is the same or a consequence."""
        assert first.known is not None
        if isinstance(error, RankFailedError):
            line = str(error)
        elif failure_of(error, first.rank, "").error == first.known.error:
            line = f"Rank {first.rank} failed with the same error: {first.known}"
        else:
            self._print(error_type, error, trace)
            line = f"Rank {first.rank} failed after {first.known}"
        must_print = first.wait_until_printed(PRINT_SECONDS)
        sys.stderr.write(f"{first.known.traceback if must_print else ''}{line}\n")
        sys.stderr.flush()

    def _print(self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours = error if isinstance(error, ParalError) else unwrap_parser_error(error)
        if ours is None or os.environ.get(TRACEBACK_VARIABLE) == "full" or has_user_cause(ours):
            self._otherwise(error_type, error, trace)
            return
        if not is_first_to_report(str(ours)):
            return
        frames = traceback.StackSummary.extract(_user_frames(trace)).format()
        heading = ["Traceback (most recent call last):\n"] if frames else []
        sys.stderr.write("".join([*heading, *frames, *traceback.format_exception_only(ours)]))


def unwrap_parser_error(error: BaseException) -> ParalError | None:
    """Return the `ParalError` inside an error of jsonargparse, or `None` if there is none."""
    trace = list(traceback.walk_tb(error.__traceback__))
    parser = sys.modules.get("jsonargparse")
    if not isinstance(error, ValueError) or parser is None or not trace:
        return None
    if not trace[-1][0].f_code.co_filename.startswith(str(Path(str(parser.__file__)).parent)):
        return None
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ParalError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def has_user_cause(error: BaseException) -> bool:
    """Return whether `error` was caused by an error in user code, such as a training step, or in code called there."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None:
        if any(True for _ in _user_frames(cause.__traceback__)):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def _user_frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    return (each for each in traceback.walk_tb(trace) if not library_of(each[0].f_code.co_filename))
