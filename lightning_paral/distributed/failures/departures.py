"""Notice that a rank ended its process after the run, but before its call of the Trainer returned.

In this time the Trainer calls the user's `teardown` and `on_fit_end`, without a watcher, because one rank may take much
longer than another. A rank that ended there with status 0 is known to the others only if they look when they exit.
"""

import atexit
import logging
import os
import sys
import time
import traceback
from contextlib import suppress
from functools import cache

import torch.distributed as dist

from lightning_paral.distributed.failures.failure import CONSEQUENCE_SECONDS, FirstFailure
from lightning_paral.distributed.failures.liveness import Liveness

_POLL_SECONDS = 0.05

_is_launching = False
_agreed_status: int | None = None
_last: "_Departures | None" = None


def begin_launch() -> None:
    """Begin a call of the Trainer, whose end `end_launch` tells the other ranks."""
    global _is_launching, _last, _agreed_status
    _check_at_exit()
    if _last is not None:
        _last.liveness.end()
    _is_launching, _last, _agreed_status = True, None, None


def end_launch(error: BaseException | None) -> None:
    """Tell the other ranks that this one leaves the Trainer, and with which error, if any."""
    global _is_launching, _last
    _is_launching = False
    if _last is not None:
        _last.liveness.say_goodbye()
        if error is not None:  # this process reports it, and does not wait for others when it exits
            _last.liveness.end()
            _last = None


def keep_watching(liveness: Liveness, first: FirstFailure, world_size: int) -> None:
    """Keep the connections of a run that ended well until the process exits or calls the Trainer again."""
    global _last
    if not _is_launching:
        liveness.end()
        return
    _last = _Departures(liveness, first, world_size)


def agree_on_exit(status: int) -> None:
    """Let all processes exit with `status` after the present run, though one may do so much later than another."""
    global _agreed_status
    _agreed_status = status


def agreed_status() -> int | None:
    """Return the status with which all ranks have agreed to exit after the present run; `None` if they have not."""
    return _agreed_status


def explain_exit_after_run(error: BaseException) -> None:
    """Do not exit with status 0 if only some ranks called `sys.exit(0)` after the run. Waits for the other ranks."""
    if not isinstance(error, SystemExit) or error.code or _agreed_status == 0:
        return
    if _last is None or _last.all_exit():
        return
    file, line = traceback.extract_tb(error.__traceback__)[-1][:2]
    sys.stderr.write(
        f"Rank {_last.first.rank} called sys.exit({'' if error.code is None else repr(error.code)}) after the run, at "
        f"{file}:{line}. The exit status is 1, because other ranks did not call it.\n"
    )
    sys.stderr.flush()
    error.code = 1


class _Departures:
    """The connections of the last run, on which each rank says goodbye when it leaves the Trainer."""

    def __init__(self, liveness: Liveness, first: FirstFailure, world_size: int) -> None:
        self.liveness = liveness
        self.first = first
        self._world_size = world_size
        self._dead: list[int] = []
        liveness.on_death = self._dead.append

    def find_dead(self) -> list[int]:
        """Wait until the other ranks have left the Trainer or died, and return those that died."""
        with suppress(KeyboardInterrupt):
            self.liveness.poll()
            while self.liveness.has_others and not self._dead:
                time.sleep(_POLL_SECONDS)
                self.liveness.poll()
        return self._dead

    def all_exit(self) -> bool:
        """Return whether all ranks call this within two seconds."""
        try:
            self.first.vote("exit after run", True)
            agree = self.first.all_vote("exit after run", self._world_size, CONSEQUENCE_SECONDS)
            if agree:  # rank 0 may serve the store
                self.first.vote("seen", True)
                if self.first.rank == 0:
                    self.first.all_vote("seen", self._world_size, CONSEQUENCE_SECONDS)
        except (dist.DistError, RuntimeError):  # rank 0, which serves the store, has ended
            return False
        return agree


@cache
def _check_at_exit() -> None:
    """Check once, after functions that are registered later, such as the one that waits for launched processes."""
    atexit.register(_end_with_error_if_one_died)


def _end_with_error_if_one_died() -> None:
    if _last is None or getattr(sys, "last_value", None) is not None:  # Python has printed an error: the status is 1
        return
    dead = _last.find_dead()
    if dead:
        sys.stderr.write(
            f"Rank {dead[0]} died after the run, in its teardown: its process ended without an exception. The exit "
            f"status of rank {_last.first.rank} is 1 because of it.\n"
        )
        end_with_error()


def end_with_error() -> None:
    """End this process with status 1, without functions that are registered for its exit."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
