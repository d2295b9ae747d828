"""Read the stack of a thread that is running."""

import gc
import os
import sys
import threading
from types import FrameType

_lock = threading.Lock()
_is_paused = False
"""Whether garbage collection is off because a stack is being read."""


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first; an empty list if it has ended.

    The caller must not keep them: they keep the local variables of their functions.

    Args:
        thread: the identifier of the thread.
    """
    # Before Python 3.12, creating the object of a frame may collect garbage. A finalizer can then let the other thread
    # run and leave the function, and using the object crashes the process.
    global _is_paused
    with _lock:
        _is_paused = sys.version_info < (3, 12) and gc.isenabled()
        if _is_paused:
            gc.disable()
        try:
            frames, frame = [], sys._current_frames().get(thread)
            while frame is not None:
                frames.append(frame)
                frame = frame.f_back
            return frames
        finally:
            if _is_paused:
                gc.enable()
            _is_paused = False


def _continue_in_forked_process() -> None:
    global _lock
    _lock = threading.Lock()
    if _is_paused:
        gc.enable()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_continue_in_forked_process)
