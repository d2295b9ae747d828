"""Log a timeout and the stack of this rank before NCCL ends the process without an exception."""

import logging
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta

from lightning_paral.compat.torch.aborting import nccl_errors
from lightning_paral.distributed.hangs.frames import frames_of

log = logging.getLogger(__name__)


class TimeoutWatch:
    """Checks once per second, in a thread, whether an NCCL collective has failed or timed out.

    In that case no exception reaches Python: NCCL's watchdog dumps debug information for a minute, then ends the
    process. The thread logs the timeout, the option that sets it, and the main thread's stack.

    Args:
        timeout: the timeout of the process group.
        option: the name of the option that sets it.
        errors: a function that returns the names of the errors found so far.
        interval: the number of seconds between checks.
        on_timeout: called after a timeout, before it is logged.
    """

    def __init__(
        self,
        timeout: timedelta,
        option: str,
        errors: Callable[[], list[str]] = nccl_errors,
        interval: float = 1.0,
        on_timeout: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeout = timeout
        self._option = option
        self._errors = errors
        self._interval = interval
        self._on_timeout = on_timeout
        self._ended = threading.Event()
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="lightning_paral_timeout", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop checking."""
        self._ended.set()
        self._thread.join()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because a thread belongs to one process."""
        return type(None), ()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            found = self._errors()
            if found:
                if found[0] == "TIMEOUT":
                    self._on_timeout()
                log.error("%s", self._describe(found[0]))
                return

    def _describe(self, error: str) -> str:
        what = (
            f"A collective did not finish within timeout={self._timeout}, set by `{self._option}`: some rank failed, "
            "hangs, or is slow. Look for the first error among all ranks. If a rank is only slow, raise the timeout."
            if error == "TIMEOUT"
            else f"NCCL reports {error} in a collective: some rank failed or cannot be reached. Look for the "
            "first error among all ranks."
        )
        frames = frames_of(self._main_thread)[::-1]
        stack = "".join(traceback.StackSummary.extract((each, each.f_lineno) for each in frames).format())
        return f"{what} NCCL is about to end this process, which is at:\n{stack}"
