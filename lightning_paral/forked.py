"""Forked processes, such as a loader's workers, leave alone what they inherit."""

import gc
import os
from functools import cache


@cache
def protect_inherited_objects() -> None:
    """Let processes forked from this one never collect objects they inherit. Doing it twice changes nothing.

    A process group that is garbage, of a run that has ended, would otherwise be destroyed by the first collection in a
    worker. Its destructor waits for threads that exist in this process only: the worker hangs, or crashes.
    """
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=gc.freeze)
