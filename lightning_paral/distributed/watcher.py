"""A thread of each rank that talks to the other ranks while the main thread computes or waits in a collective."""

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_paral.compat.torch.process_groups import default_store

POLL_SECONDS = 0.5
_SILENT_SECONDS = 10
"""No process is ended before the store has failed to answer for so many seconds."""

log = logging.getLogger(__name__)


class Topic(Protocol):
    """Something that the watchers of all ranks exchange messages about, such as a failure or a request to stop."""

    def poll(self, store: Store) -> None:
        """Read and write messages. The watcher calls this in its thread, twice per second; it must not wait long.

        Args:
            store: a store with a connection of its own, in a namespace of the run.

        Raises:
            RuntimeError: the store cannot be reached, because the process that serves it has ended.
        """


class ReachableStore:
    """A store that is not used any more once it could not be reached: torch would print a stack at each attempt."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._error: str | None = None
        self.num_answers = 0
        """How many calls have ended."""

    def __getattr__(self, name: str) -> Any:
        """Return the method `name` of the store, which raises a `DistNetworkError` if the store cannot be reached."""
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            if self._error is not None:
                raise dist.DistNetworkError(self._error)
            try:
                return method(*arguments)
            except dist.DistNetworkError as error:
                self._error = str(error)
                raise
            finally:
                self.num_answers += 1

        return call


class RankWatcher:
    """Polls the store of the default process group in a daemon thread during a run.

    Messages between watchers need no collective, so they arrive while the main thread of a rank is in a collective, in
    user code, or stopped, and they cost nothing in a training step.

    A call to the store has no timeout of its own. While the process that serves the store is stopped, or its node
    cannot be reached, every call blocks, and so does everything that ends a run after a failure. A second thread then
    ends this process. It counts seconds in which the process runs, so that ranks continue after all were suspended.

    Args:
        run: the name of the run, equal on all ranks.
        patience: for how many seconds the store may be silent, as long as no error has ended the run on this rank.
        poll_seconds: the number of seconds between two polls.
    """

    def __init__(self, run: str, patience: float, poll_seconds: float = POLL_SECONDS) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.main_thread = threading.get_ident()
        """The identifier of the thread that trains."""
        store: Any = default_store()  # torch's stubs lack `clone`
        # A clone, because a store serves one call at a time: the main thread may wait in another call.
        self.store: Any = ReachableStore(PrefixStore(f"lightning_paral/run/{run}", store.clone()))
        """The store in a namespace of the run, with a connection of its own. Its calls must be short."""
        self.main_store: Store = PrefixStore(f"lightning_paral/run/{run}", default_store())
        """The store in the same namespace, for the main thread."""
        self._poll_seconds = poll_seconds
        self._patience = patience
        self._error: BaseException | None = None
        self._num_polls = 0
        self._topics: list[Topic] = []
        self._calls: dict[int, Callable[[], object]] = {}
        """What to call after signals, by their number."""
        self._heard_before = -1
        self._ended = threading.Event()
        self._read_end, self._write_end = socket.socketpair()
        """A byte wakes the polling thread: the number of a signal, or 0."""
        self._write_end.setblocking(False)
        functions = {"lightning_paral_watcher": self._poll, "lightning_paral_guard": self._guard}
        self._threads = [threading.Thread(target=each, name=name, daemon=True) for name, each in functions.items()]
        for thread in self._threads:
            thread.start()

    def add(self, topic: Topic) -> None:
        """Poll `topic` from now on."""
        self._topics = [*self._topics, topic]
        self.wake()

    def remove(self, topic: Topic) -> None:
        """Stop polling `topic`."""
        self._topics = [each for each in self._topics if each is not topic]

    def hear(self, signum: int, call: Callable[[], object]) -> None:
        """Call `call` in the watcher's thread after each signal `signum`, even if the main thread waits in C code.

        Python calls its own handler, which has to be set as well, only when the main thread runs Python code again.
        Call this in the main thread; in another one it does nothing, because Python takes signals in the main one only.
        """
        if threading.current_thread() is threading.main_thread():
            if not self._calls:
                _keep_own_signals_in_forks()
                self._heard_before = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
            self._calls[signum] = call

    def wake(self) -> None:
        """Poll now instead of at the end of the current interval."""
        with suppress(OSError):  # it is awake already, or has ended
            self._write_end.send(b"\0")

    def hurry(self) -> None:
        """Poll ten times per second from now on."""
        self._poll_seconds = min(self._poll_seconds, 0.1)
        self.wake()

    def leave(self, error: BaseException) -> None:
        """Note that `error` ends the run on this rank, whose main thread needs the store for it."""
        self._error, self._patience = error, 0.0

    def end(self) -> None:
        """Stop polling. If a poll is in progress, wait for it for a second at most."""
        self._ended.set()
        self.wake()
        if self._calls:
            set_last = signal.set_wakeup_fd(-1)
            ours = set_last == self._write_end.fileno()  # otherwise somebody else set it meanwhile
            with suppress(OSError, ValueError):  # whoever heard signals before may have closed its file since
                signal.set_wakeup_fd(self._heard_before if ours else set_last)
            self._calls = {}
        for thread in self._threads:
            thread.join(timeout=1.0)
        self._read_end.close()
        self._write_end.close()
        self._error = None  # its traceback would keep the run's objects in memory

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because a thread belongs to one process."""
        return type(None), ()

    def _poll(self) -> None:
        seconds = self._poll_seconds / 16  # shorter at first, because ranks meet through the topics
        while not self._ended.is_set():
            self._read_end.settimeout(seconds)
            with suppress(TimeoutError):
                for signum in self._read_end.recv(64):
                    self._hear(signum)
            for topic in self._topics:
                try:
                    topic.poll(self.store)
                except (dist.DistError, RuntimeError) as error:
                    log.debug("The watcher cannot reach the store: %s", error)
                except Exception:
                    log.exception("%s failed", type(topic).__name__)
                    self.remove(topic)
            self._num_polls += 1
            seconds = min(2 * seconds, self._poll_seconds)

    def _hear(self, signum: int) -> None:
        if signum and self._heard_before != -1:  # such as that of an event loop of asyncio
            with suppress(OSError):
                os.write(self._heard_before, bytes([signum]))
        try:
            self._calls.get(signum, bool)()
        except Exception:
            log.exception("What signal %d calls failed", signum)

    def _guard(self) -> None:
        seen, silent = 0, 0
        while not self._ended.wait(1.0):
            now = self._num_polls + self.store.num_answers
            silent, seen = (silent + 1 if now == seen else 0), now
            if silent > max(_SILENT_SECONDS, self._patience):
                self._end_process(silent)

    def _end_process(self, silent: int) -> None:
        cause = "" if self._error is None else "".join(traceback.format_exception(self._error))
        try:
            sys.stderr.write(
                f"{cause}Rank {self.rank} ends: the process that serves the store, which is rank 0 or torchrun, has "
                f"not answered for {silent} s. It is stopped, or its node cannot be reached.\n"
            )
            sys.stderr.flush()
            if self._error is None:
                faulthandler.dump_traceback(sys.__stderr__ or 2)
        finally:  # also if nobody reads stderr any more
            os._exit(1)


@cache
def _keep_own_signals_in_forks() -> None:
    """Let processes forked from this one, such as workers of loaders, not write their signals into its socket."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class SignalHandler:
    """Handles a signal by `call` until `restore` is called; afterwards, and in forked processes, as before.

    So it does no harm if someone sets it again later, as Lightning does at the end of a run. Unlike with `SIG_IGN`,
    programs that are started meanwhile do not ignore the signal.

    Create it, and call `restore`, in the main thread.

    Args:
        signum: the signal.
        call: called with the number of the signal and the frame; by default, the signal is ignored.
        before: the handler to restore; by default, that of now.
    """

    def __init__(self, signum: int, call: Callable[..., None] | None = None, before: Any = None) -> None:
        self._signum, self._call = signum, call
        self._before = handler_of(signum) if before is None else before
        self._process = os.getpid()
        signal.signal(signum, self)

    def restore(self) -> None:
        """Set the handler before this one, unless someone has replaced this one."""
        self._process = 0
        is_set = isinstance(signal.getsignal(self._signum), SignalHandler)
        if is_set and threading.current_thread() is threading.main_thread():
            signal.signal(self._signum, handler_of(self._signum))

    @property
    def is_restored(self) -> bool:
        """Whether `restore` was called. Someone may have set this handler again since."""
        return self._process == 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if os.getpid() != self._process:
            signal.signal(signum, self._before)
            os.kill(os.getpid(), signum)
        elif self._call is not None:
            self._call(signum, frame)


def handler_of(signum: int) -> Any:
    """Return the handler of a signal that acts now; `SIG_DFL` if C code has set it."""
    handler: Any = signal.getsignal(signum)
    while isinstance(handler, SignalHandler) and handler.is_restored:
        handler = handler._before
    return signal.SIG_DFL if handler is None else handler


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for `seconds` at most; return whether the condition is true."""
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true


def exchange_in_store(key: str, value: str, timeout: timedelta, ranks: Iterable[int]) -> dict[int, str]:
    """Return, by global rank, the values of those of `ranks` that call this with the same `key` within `timeout`.

    Unlike a collective, this shows which ranks do not take part.

    Args:
        key: a name for the exchange, which this process group has not used before.
        value: the value of this rank.
        timeout: how long to wait for the other ranks.
        ranks: the global ranks to wait for.

    Raises:
        RuntimeError: the store cannot be reached, because the process that serves it has ended.
    """
    store: Any = default_store()
    keys = {rank: f"lightning_paral/{key}/{rank}" for rank in ranks}
    store.set(keys[dist.get_rank()], value)
    with suppress(dist.DistError, RuntimeError):
        store.wait(list(keys.values()), timeout)
    return {rank: store.get(each).decode() for rank, each in keys.items() if store.check([each])}
