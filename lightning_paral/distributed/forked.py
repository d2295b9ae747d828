"""Prevent forked processes, such as loader workers, from destroying inherited objects."""

import gc
import os
from functools import cache


@cache
def protect_inherited_objects() -> None:
    """Prevent processes forked from this one from garbage-collecting inherited objects. Later calls have no effect.

    Otherwise the first garbage collection in a worker destroys unreachable process groups of an earlier run. Their
    destructor waits for threads that exist only in the parent process, so the worker hangs or crashes.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=gc.freeze)
