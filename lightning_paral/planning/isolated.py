"""Run a function in a forked process, so that it can neither change nor crash this one."""

import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lightning_paral.errors import ParalError

Result = TypeVar("Result")


class IsolatedError(ParalError, RuntimeError):
    """The function failed, crashed its process, or did not return in time."""


def run_isolated(function: Callable[[], Result], timeout: float = 300.0) -> Result:
    """Return what `function` returns in a fork of this process.

    Args:
        function: its result must be picklable. It computes with one thread, because OpenMP's threads do not exist in a
            fork.
        timeout: seconds after which the fork is ended.

    Raises:
        ParalError: `function` raised it.
        IsolatedError: `function` raised another error, which the message names; or it crashed or took too long.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_in_child(function, writer)
    os.close(writer)
    try:
        answer = _read(reader, time.monotonic() + timeout)
    finally:
        os.close(reader)
        if _is_running(child):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if answer is None:
        raise IsolatedError(f"it did not end within {timeout:.0f} seconds")
    if not answer:
        raise IsolatedError("its process crashed")
    has_failed, result = pickle.loads(answer)
    if not has_failed:
        return result  # type: ignore[no-any-return]
    raise result


def _run_in_child(function: Callable[[], Any], writer: int) -> None:
    """Write whether `function` failed, and its result or error, to the pipe `writer`; end the process."""
    try:
        torch.set_num_threads(1)
        try:
            answer = pickle.dumps((False, function()))
        except ParalError as error:
            answer = _pickled(error)
        except BaseException as error:
            answer = _pickled(IsolatedError(_explained(error)))
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)  # without the handlers of the parent


def _explained(error: BaseException) -> str:
    if "Autograd-and-Fork" in str(error):  # https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork
        return (
            "this process has trained before, and with this build of torch, a fork of it cannot compute gradients, so "
            "it has to be done in a new process"
        )
    return f"{type(error).__name__}: {error}"


def _pickled(error: Exception) -> bytes:
    try:
        return pickle.dumps((True, error))
    except Exception:
        return pickle.dumps((True, IsolatedError(f"{type(error).__name__}: {error}")))


def _read(reader: int, deadline: float) -> bytes | None:
    """Return all bytes of the pipe; `None` after the deadline, which is a time of `time.monotonic`."""
    parts: list[bytes] = []
    poll = select.poll()  # `select.select` refuses descriptors from 1024 on
    poll.register(reader, select.POLLIN)
    while True:
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            return None
        part = os.read(reader, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _is_running(child: int) -> bool:
    """Return whether the process runs. If it has ended, its status is collected."""
    for _ in range(100):  # it has closed the pipe, so it is about to end
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return False
        time.sleep(0.01)
    return True
