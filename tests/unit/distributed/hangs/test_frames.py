"""The stack of a running thread is read without collecting garbage."""

import gc
import inspect
import linecache
import sys
import threading
from collections.abc import Iterator

import pytest

from lightning_paral.distributed.hangs.frames import frames_of

START, WALK = "frames, frame = [], sys._current_frames().get(thread)", "frame = frame.f_back"


@pytest.fixture
def collected_in() -> Iterator[set[str]]:
    """The functions and lines in which garbage was collected, while each new object may begin a collection."""
    seen: set[str] = set()

    def note(phase: str, info: dict[str, int]) -> None:
        frame = sys._getframe(1)  # not the whole stack: reading it here would create the objects of all frames
        seen.update((frame.f_code.co_name, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()))

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    yield seen
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(note)


def names_at(depth: int) -> list[str]:
    if depth:
        return names_at(depth - 1)
    return [each.f_code.co_name for each in frames_of(threading.get_ident())]


def test_frames_are_innermost_first_and_no_garbage_is_collected_meanwhile(collected_in: set[str]) -> None:
    names = names_at(20)

    source = inspect.getsource(frames_of)
    assert START in source
    assert WALK in source
    assert names[0] == "frames_of"
    assert names.count("names_at") == 21
    assert collected_in
    if sys.version_info < (3, 12):  # later, collections do not interrupt the creation of a frame
        assert collected_in.isdisjoint({WALK, START})
    assert gc.isenabled()


def test_thread_that_has_ended_has_no_frames() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()

    assert thread.ident is not None
    assert frames_of(thread.ident) == []
