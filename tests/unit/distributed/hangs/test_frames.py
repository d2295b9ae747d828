"""The stack of a running thread is read, innermost frame first."""

import threading

from lightning_paral.distributed.hangs.frames import frames_of


def names_at(depth: int) -> list[str]:
    if depth:
        return names_at(depth - 1)
    return [each.f_code.co_name for each in frames_of(threading.get_ident())]


def test_frames_are_innermost_first() -> None:
    names = names_at(20)

    assert names[0] == "frames_of"
    assert names.count("names_at") == 21


def test_thread_that_has_ended_has_no_frames() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()

    assert thread.ident is not None
    assert frames_of(thread.ident) == []
