"""End a rank soon after another one has failed, wherever its main thread is."""

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from lightning_paral.compat.torch.aborting import abort_nccl
from lightning_paral.compat.torch.process_groups import store_port
from lightning_paral.distributed.failures.connections import (
    Endpoints,
    as_text,
    close_connections,
    from_text,
    own_connections,
)
from lightning_paral.distributed.failures.departures import keep_watching
from lightning_paral.distributed.failures.failure import (
    CONSEQUENCE_SECONDS,
    PRINT_SECONDS,
    Failure,
    FirstFailure,
    as_consequence,
    failure_of,
    is_interruption,
    is_told,
    remember_first,
)
from lightning_paral.distributed.failures.interrupt import Interrupt
from lightning_paral.distributed.failures.liveness import Liveness
from lightning_paral.distributed.failures.torchrun_report import tell_torchrun
from lightning_paral.distributed.launching.rank_main import tell_parent
from lightning_paral.distributed.watcher import Ignored, RankWatcher

_ABORT_AFTER = 0.2
"""Seconds after this rank learned of the failure at which its collectives are aborted. If all ranks raise the same
error, each leaves the run before, and a process group that the user created can still be used."""
_INTERRUPT_AFTER = 0.5
"""Seconds after this rank learned of the failure at which Python code in its main thread is interrupted."""
_END_AFTER = 2.5
"""Seconds after which the process is ended if its main thread has not left the run."""
_TEARDOWN_SECONDS = 60.0
"""How long the teardown may take, once the main thread has left the run."""


class FailureWatch:
    """Learns of the first failure of a run, and ends this rank's part in the run.

    When another rank has failed and the main thread does not leave the run by itself, the watcher's thread closes the
    connections between ranks and aborts NCCL, so that a collective in the main thread raises an error. Then it
    interrupts Python code in the main thread. If this does not help within `_END_AFTER` seconds, it ends the process.

    Args:
        watcher: the watcher that polls this topic.
        main_port: the port of the cluster environment's store.
        liveness: notices that the process of another rank has died.
        exit_status: returns how the process of a local rank ended; `None` if it is not known. Only the process that
            launched the rank knows.
        save_seconds: how long a save after a failure may take. The process is then ended.
    """

    def __init__(
        self,
        watcher: RankWatcher,
        main_port: int,
        liveness: Liveness,
        exit_status: Callable[[int], str | None] | None = None,
        save_seconds: float = _TEARDOWN_SECONDS,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.first = FirstFailure(watcher.store, self.rank)
        self._watcher = watcher
        self._store_ports = [port for port in (main_port, store_port()) if port is not None]
        self._exit_status = exit_status
        self._save_seconds = max(save_seconds, _TEARDOWN_SECONDS)
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._liveness = liveness
        self._liveness.on_death = self._on_death
        self._dead: set[int] = set()
        self._found: Exception | None = None
        self._learned_at: float | None = None
        self.is_saving = False
        """Whether the main thread saves a checkpoint after the failure, which may take long."""
        self._is_leaving = False
        self._left_at = 0.0
        self._is_aborted = False
        self._lock = threading.Lock()
        self._connections: list[Endpoints] | None = None
        self._open_ranks = set(range(self.world_size)) - {self.rank}
        self._main_thread = threading.get_ident()
        self._interrupt = Interrupt()
        self._ignored: Ignored | None = None

    # Called by the main thread

    def report(self, error: BaseException, where: str) -> BaseException:
        """Tell the other ranks that `error` ended the run on this one, unless another rank failed before.

        Call this while `error` is being handled.

        Returns:
            BaseException: the error to raise: `error`, a `RankFailedError` if `error` is a consequence of the failure
                of another rank, or a `SystemExit` with status 1 if only some ranks called `sys.exit(0)`.
        """
        self.leave()
        if is_interruption(error) or is_told(error):
            self.first.wait(CONSEQUENCE_SECONDS)
        first = self.first.report(failure_of(error, self.rank, where))
        with suppress(dist.DistError, RuntimeError):  # rank 0, which serves the store, may have ended
            self._publish_connections()  # now, because the watcher may end before its next poll
        raised = as_consequence(error, self.first.why_interrupted())
        if raised is error and first.rank == self.rank:
            if self._found is not None and is_interruption(error):
                raised = self._found.with_traceback(error.__traceback__)
            tell_torchrun(raised)
        remember_first(raised, self.first)
        return self._explain_exit(raised, where)

    def _explain_exit(self, error: BaseException, where: str) -> BaseException:
        """Print a line for `sys.exit` and Ctrl-C, for which Python prints nothing, and do not exit with status 0.

        If all ranks call `sys.exit(0)`, leave it as it is.
        """
        try:
            is_regular = isinstance(error, SystemExit) and not error.code
            self.first.vote("exit", is_regular)
            if is_regular and self.first.all_vote("exit", self.world_size, CONSEQUENCE_SECONDS):
                return error
        except (dist.DistError, RuntimeError):  # rank 0, which serves the store, has ended
            pass
        if isinstance(error, Exception):
            return error
        if isinstance(error, SystemExit):
            what = f"called sys.exit({'' if error.code is None else repr(error.code)})"
            status = "" if error.code else " The exit status is 1, because other ranks did not call it."
            advice = f"{status} To end a run early, set trainer.should_stop = True on all ranks."
            error.code = error.code or 1
        else:
            what, advice = f"ended by {type(error).__name__}", ""
        if self.first.is_own:
            file, line = traceback.extract_tb(error.__traceback__)[-1][:2]
            sys.stderr.write(f"Rank {self.rank} {what} in {where}, at {file}:{line}.{advice}\n")
            sys.stderr.flush()
            self.first.set_printed()
        return error

    def leave(self) -> None:
        """Do not interrupt the main thread from now on: it has left the run, and runs the teardown.

        Ignore SIGTERM until `end`: torchrun sends it as soon as one rank has ended, and Lightning's handler would
        broadcast to ranks that may be gone.
        """
        self._interrupt.stop()
        if self._ignored is None and threading.current_thread() is threading.main_thread():
            self._ignored = Ignored(signal.SIGTERM)
        self._is_leaving, self._left_at = True, time.monotonic()

    def end(self) -> None:
        """End with the run, and restore the signal handlers. After a run that ended well, deaths are still noticed."""
        if self.first.known is None:
            keep_watching(self._liveness, self.first, self.world_size)
        else:
            self._liveness.end()
        self._interrupt.end()
        if self._ignored is not None and threading.current_thread() is threading.main_thread():
            self._ignored.restore()
            self._ignored = None

    # Called by the watcher's thread

    def end_with(self, error: Exception, where: str) -> None:
        """End the run with `error`, which a topic has found, unless another failure ends it.

        Args:
            error: the error that the main thread is to raise.
            where: the part of the run, as in `Failure`.
        """
        self._found = error
        self.first.report(failure_of(error, self.rank, where))

    def poll(self, store: Store) -> None:
        """Learn of a failure, and react to it."""
        self._liveness.poll()
        if self._parent is not None and os.getppid() != self._parent:
            self.first.report(self._death(self.rank, "the process that started this rank has ended"))
        try:
            self.first.check()
        except (dist.DistError, RuntimeError):
            if self.first.known is None:
                raise
        if self.first.known is not None:
            self._react()

    def _react(self) -> None:
        now = time.monotonic()
        if self._learned_at is None:
            self._learned_at = now
            self._watcher.hurry()
        since = now - self._learned_at
        if self._is_leaving:
            if now - self._left_at > (self._save_seconds if self.is_saving else _TEARDOWN_SECONDS):
                self._end_process()
        elif since > _END_AFTER:
            self._end_process()
        elif since > _ABORT_AFTER:
            if not self._is_aborted:
                self._is_aborted = True
                # In a thread, because NCCL may wait for kernels that never end.
                threading.Thread(target=abort_nccl, name="lightning_paral_abort", daemon=True).start()
            with suppress(dist.DistError, RuntimeError):  # rank 0, which serves the store, may have ended
                self._close_connections()
            if since > _INTERRUPT_AFTER:
                self._interrupt.send(self._main_thread, self.first.why_ended())

    def dead_ranks(self) -> set[int]:
        """Return the ranks that are known to have died, or whose watcher is about to end their process.

        Rank 0 notices all deaths, the other ranks that of rank 0.
        """
        first = self.first.known
        found = self._dead | ({first.rank} if first is not None and first.has_died else set())
        with suppress(dist.DistError, RuntimeError):  # rank 0, which serves the store, may have ended
            if self.first.store.check(["dead"]):
                found |= set(json.loads(self.first.store.get("dead")))
            if self.first.store.check(["ending"]):
                found |= set(map(int, self.first.store.get("ending").split()))
        return found

    def _on_death(self, rank: int) -> None:
        self._dead = self._dead | {rank}
        if self.rank == 0:
            self.first.store.set("dead", json.dumps(sorted(self._dead)))
        if self.first.known is None:
            deadline, status = time.monotonic() + 0.5, None
            while self._exit_status is not None and status is None and time.monotonic() < deadline:
                time.sleep(0.05)  # the launcher may learn it a moment later
                status = self._exit_status(rank)
            self.first.report(self._death(rank, status or "its process ended without an exception"))

    def _death(self, rank: int, how: str) -> Failure:
        return Failure(rank=rank, node=socket.gethostname() if self.rank == rank else "", error=how, has_died=True)

    def _close_connections(self) -> None:
        """Close the connections to other ranks. They are known from what both ends say of them."""
        self._publish_connections()
        assert self._connections is not None
        for other in self._open_ranks:
            if self.first.store.check([f"connections/{other}"]):
                close_connections(self._connections, from_text(self.first.store.get(f"connections/{other}").decode()))
                self._open_ranks = self._open_ranks - {other}

    def _publish_connections(self) -> None:
        """Publish the present connections, once: ranks that failed together connect anew to save."""
        with self._lock:
            if self._connections is None:
                connections = own_connections([*self._store_ports, self._liveness.port])
                self.first.store.set(f"connections/{self.rank}", as_text(connections))
                self._connections = connections

    def _end_process(self) -> None:
        """End this process without a teardown, which its main thread does not reach."""
        first = self.first.known
        assert first is not None
        with suppress(dist.DistError, RuntimeError):  # rank 0, which serves the store, may have ended
            self.first.store.append("ending", f"{self.rank} ")
        was_leaving = self._is_leaving
        if self.first.is_own:
            must_print = not self.first.is_printed
            tell_torchrun(self._found)
        else:
            told = tell_parent(self.rank, self.first.why_ended(), first.traceback)
            must_print = not told and self.first.wait_until_printed(PRINT_SECONDS)
        if self._is_leaving and not was_leaving:
            return  # the main thread has left the run meanwhile, and may save
        with suppress(OSError, ValueError):  # nobody reads stderr any more, or it is closed
            if must_print and first.traceback:
                sys.stderr.write(first.traceback)
            sys.stderr.write(f"{self.first.why_ended()}\n")
            sys.stderr.flush()
        end_children()
        os._exit(1)


def end_children() -> None:
    """Kill the processes that this process started by `multiprocessing`, such as loader workers."""
    for child in multiprocessing.active_children():
        with suppress(OSError, ValueError):
            child.kill()
