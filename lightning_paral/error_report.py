"""Report uncaught errors of this package briefly: the user's own lines and the message, once per run.

`import lightning_paral` loads this module, so it imports the watch of a run only when a program fails.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from lightning_paral.errors import ParalError, RankFailedError

if TYPE_CHECKING:
    from lightning_paral.distributed.failure import FirstFailure

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

TRACEBACK_VARIABLE = "PARAL_TRACEBACK"
"""The environment variable that restores complete tracebacks if its value is `full`."""


def install_brief_excepthook() -> None:
    """Print uncaught errors of this package without the frames of libraries.

    If several ranks of a run fail with the same error, one of them prints it. All other errors are printed in full,
    and so is an error of this package that was caused by an error in user code, such as a training step.
    """
    if not isinstance(sys.excepthook, _BriefExceptHook):
        sys.excepthook = _BriefExceptHook(sys.excepthook)


class _BriefExceptHook:
    def __init__(self, otherwise: Hook) -> None:
        self._otherwise = otherwise

    def __call__(self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from lightning_paral.distributed.failure import first_failure_of, tell_torchrun

        first = first_failure_of(error)
        if first is None or first.is_own:
            tell_torchrun(error)
        if first is None or first.known is None:
            self._print(error)
        elif first.is_own:
            first.print_own(lambda: self._print(error))
        else:
            self._print_after_first(first, error)

    def _print_after_first(self, first: "FirstFailure", error: BaseException) -> None:
        """Print the error of a rank that did not fail first, in one line if it is the same or a consequence."""
        from lightning_paral.distributed.failure import failure_of

        assert first.known is not None
        if isinstance(error, RankFailedError):
            line = str(error)
        elif failure_of(error, first.rank, "").error == first.known.error:
            line = f"Rank {first.rank} failed with the same error: {first.known}"
        else:
            self._print(error)
            line = f"Rank {first.rank} failed after {first.known}"
        first.print_after(line)

    def _print(self, error: BaseException) -> None:
        is_ours = isinstance(error, ParalError) and not has_user_cause(error)
        if not is_ours or os.environ.get(TRACEBACK_VARIABLE) == "full":
            self._otherwise(type(error), error, error.__traceback__)
        else:
            frames = traceback.StackSummary.extract(_user_frames(error.__traceback__)).format()
            heading = ["Traceback (most recent call last):\n"] if frames else []
            sys.stderr.write("".join([*heading, *frames, *traceback.format_exception_only(error)]))


def has_user_cause(error: BaseException) -> bool:
    """Return whether `error` was caused by an error in user code, such as a training step, or in code called there."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return cause is not None and (any(True for _ in _user_frames(cause.__traceback__)) or has_user_cause(cause))


def _user_frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    from lightning_paral.distributed.hangs import library_of

    return (each for each in traceback.walk_tb(trace) if not library_of(each[0].f_code.co_filename))
