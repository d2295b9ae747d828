"""Report uncaught errors of this package briefly: the user's own lines and the message, once per node.

`import lightning_paral` loads this module, so it imports the watch of a run only when a program fails.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from lightning_paral.errors import ParalError, RankFailedError

if TYPE_CHECKING:
    from lightning_paral.distributed.failures.failure import FirstFailure

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
        from lightning_paral.distributed.failures.failure import first_failure_of
        from lightning_paral.distributed.failures.torchrun_report import tell_torchrun

        first = first_failure_of(error)
        if first is None or first.is_own:
            tell_torchrun(error)
        if first is not None and first.known is not None and not first.is_own:
            self._print_after_first(first, error)
            return
        self._print(error)
        if first is not None and first.known is not None:
            sys.stderr.flush()
            first.set_printed()

    def _print_after_first(self, first: "FirstFailure", error: BaseException) -> None:
        """Print the error of a rank that did not fail first, in one line if it is the same or a consequence."""
        from lightning_paral.distributed.failures.failure import PRINT_SECONDS, failure_of

        assert first.known is not None
        if isinstance(error, RankFailedError):
            line = str(error)
        elif failure_of(error, first.rank, "").error == first.known.error:
            line = f"Rank {first.rank} failed with the same error: {first.known}"
        else:
            self._print(error)
            line = f"Rank {first.rank} failed after {first.known}"
        must_print = first.wait_until_printed(PRINT_SECONDS)
        sys.stderr.write(f"{first.known.traceback if must_print else ''}{line}\n")
        sys.stderr.flush()

    def _print(self, error: BaseException) -> None:
        from lightning_paral.distributed.process_group import is_first_to_report

        ours = error if isinstance(error, ParalError) else unwrap_parser_error(error)
        if ours is None or os.environ.get(TRACEBACK_VARIABLE) == "full" or has_user_cause(ours):
            self._otherwise(type(error), error, error.__traceback__)
        elif is_first_to_report(str(ours)):
            frames = traceback.StackSummary.extract(_user_frames(error.__traceback__)).format()
            heading = ["Traceback (most recent call last):\n"] if frames else []
            sys.stderr.write("".join([*heading, *frames, *traceback.format_exception_only(ours)]))


def unwrap_parser_error(error: BaseException) -> ParalError | None:
    """Return the `ParalError` inside an error of jsonargparse, or `None` if there is none."""
    parser = sys.modules.get("jsonargparse")
    trace = list(traceback.walk_tb(error.__traceback__))
    if not isinstance(error, ValueError) or parser is None or not trace:
        return None
    if not trace[-1][0].f_code.co_filename.startswith(str(Path(str(parser.__file__)).parent)):
        return None
    return next((each for each in (error, *_causes(error, True)) if isinstance(each, ParalError)), None)


def has_user_cause(error: BaseException) -> bool:
    """Return whether `error` was caused by an error in user code, such as a training step, or in code called there."""
    return any(True for cause in _causes(error) for _ in _user_frames(cause.__traceback__))


def _causes(error: BaseException, suppressed: bool = False) -> Iterator[BaseException]:
    """Yield the errors from which `error` was raised, the nearest first; those of `raise ... from None` as asked."""
    cause = error.__cause__ or (error.__context__ if suppressed or not error.__suppress_context__ else None)
    if cause is not None:
        yield cause
        yield from _causes(cause, suppressed)


def _user_frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    from lightning_paral.distributed.frames import library_of

    return (each for each in traceback.walk_tb(trace) if not library_of(each[0].f_code.co_filename))
