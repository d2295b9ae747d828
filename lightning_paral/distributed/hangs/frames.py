"""Read the stack of a thread that is running."""

import gc
import sys
from types import FrameType


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first; an empty list if it has ended.

    The caller must not keep them: they keep the local variables of their functions.

    Args:
        thread: the identifier of the thread.
    """
    # Before Python 3.12, creating the object of a frame may collect garbage. A finalizer can then let the other thread
    # run and leave the function, and using the object crashes the process.
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        frames, frame = [], sys._current_frames().get(thread)
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return frames
    finally:
        if collects:
            gc.enable()
