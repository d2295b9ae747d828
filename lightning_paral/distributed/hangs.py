"""Say where all ranks are: on SIGUSR2, and when a collective does not finish within the timeout.

Each rank answers in the watcher's thread, wherever its main thread waits. Answers go through the store.
"""

import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_paral.compat.torch.process_groups import nccl_errors
from lightning_paral.distributed.exchange import name_ranks
from lightning_paral.distributed.watcher import RankWatcher, SignalHandler, handler_of, wait_until

DIFFERENT = (
    "The collectives of the ranks do not match. Every rank must run the same units equally often, and use the same "
    "parameters, whatever its samples are. Run a unit without samples on a dummy input, adding 0 * its output to the "
    "loss, and continue a loop of generation until all ranks are done, as synced_gpus=True does."
)
_ANSWER_SECONDS = 1.5
"""How long a rank waits for the answers of the others. If its collective timed out, they learn of the failure only
afterwards, and those whose connections it has closed wait for three seconds for the cause."""
_SAME_HANG_SECONDS = 2.0
"""For how long answers count: several ranks time out together."""
_SIGNAL: Any = getattr(signal, "SIGUSR2", None)  # Windows has none

LIBRARIES = (
    "lightning_paral",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
    "torch",
    "torchmetrics",
    "deepspeed",
    "fsspec",
    "jsonargparse",
    "numpy",
    "tqdm",
)
"""Packages whose frames are not the user's. Other packages, such as a library of models, count as user code."""
_WAITS = (
    "torch/distributed/",
    "torch/autograd/graph.py",  # DDP waits for gradients in C++, below the backward pass
    "torch/nn/parallel/distributed.py",
    "deepspeed/comm/",
    "deepspeed/runtime/zero/",
    "lightning_paral/comm/",
    "lightning_paral/distributed/",
    "lightning_paral/engines/zero/process.py",
)
"""Files of libraries in whose functions a rank waits for other ranks."""
_WRAPPERS = ("torch/_ops.py", "deepspeed/utils/nvtx.py")
"""Files whose functions call others that are written in C++, whichever they are."""

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a thread is."""

    text: str
    """Such as `` `training_step` (train.py:41), in `all_reduce` (torch/distributed/distributed_c10d.py:3173) ``."""
    waits: bool
    """Whether it seems to wait for other ranks. A backward pass that computes seems so as well."""


class Hangs:
    """A topic of the watcher: if a rank asks, each rank says where its main thread is, and logs all of its stacks.

    A rank that asked logs where all ranks are.

    Args:
        watcher: the watcher that polls this topic.
        timeout: the timeout of collectives.
        option: the name of the option that sets it.
        takes_signal: whether to ask when this process receives SIGUSR2. A handler of the user is left alone.
    """

    def __init__(self, watcher: RankWatcher, timeout: timedelta, option: str, *, takes_signal: bool = True) -> None:
        self._watcher, self._rank, self._world_size = watcher, watcher.rank, watcher.world_size
        self._timeout = f"timeout={timeout}, set by `{option}`"
        self._left_at: Place | None = None
        self._has_broken = False
        self._lock = threading.Lock()
        self._round, self._answered_at = 0, 0.0
        """The last request that this rank has answered, and when."""
        self._taken: SignalHandler | None = None
        """The handler of SIGUSR2 in the main thread, if this topic hears the signal."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if takes_signal and _SIGNAL is not None and in_main_thread and handler_of(_SIGNAL) == signal.SIG_DFL:
            self._taken = SignalHandler(_SIGNAL)
            watcher.hear(_SIGNAL, partial(self.where_all_are, f"SIGUSR2 reached rank {self._rank}.", ""))

    def where_all_are(self, why: str, if_all_wait: str = DIFFERENT) -> str:
        """Ask all ranks where they are; return `why` with the answer, which one of the ranks that asked logs.

        Waits for the answers, for a moment at most. Call this in any thread.

        Args:
            why: a sentence about why this rank asks.
            if_all_wait: a sentence to add if all ranks wait for each other, in different places.
        """
        store, own = self._watcher.store, str(self._rank)
        try:
            asked = int(store.add("stacks/asked", 0))
            if asked == self._round and time.monotonic() - self._answered_at > _SAME_HANG_SECONDS:
                asked = int(store.compare_set("stacks/asked", str(asked), str(asked + 1)))  # once, if several ask
            self._answer(asked)
            keys = [f"stacks/{asked}/{rank}" for rank in range(self._world_size)]
            wait_until(lambda: store.check(keys), _ANSWER_SECONDS)
            places = {rank: Place(*json.loads(store.get(key))) for rank, key in enumerate(keys) if store.check([key])}
            summary = f"{why} {summarize(places, self._world_size, if_all_wait)}"
            if store.compare_set(f"stacks/{asked}/logged", "", own) == own.encode():
                log.warning("%s", summary)
            return summary
        except (dist.DistError, RuntimeError):  # the process that serves the store has ended
            return why

    def leave(self, error: BaseException) -> None:
        """Answer from now on where `error` was raised, which ends the run on this rank. Call this while handling it."""
        raised = reversed(list(traceback.walk_tb(error.__traceback__)))  # ends at the frame that has caught it
        self._left_at = place_of([*raised, *traceback.walk_stack(None)])

    def end(self) -> None:
        """Release the signal."""
        if self._taken is not None:
            self._taken.restore()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because it belongs to one run in one process."""
        return type(None), ()

    def poll(self, store: Any) -> None:
        """Answer a request, and ask after an error in NCCL, of which no exception reaches Python."""
        found = [] if self._has_broken or self._left_at is not None else nccl_errors()
        if found:
            self._has_broken = True
            late = f"A collective of rank {self._rank} did not finish within {self._timeout}."
            why = late if "TIMEOUT" in found else f"NCCL reports {found[0]} in a collective of rank {self._rank}."
            self.where_all_are(f"{why} NCCL ends this process soon.")
        self._answer(int(store.add("stacks/asked", 0)))

    def _answer(self, asked: int) -> None:
        with self._lock:
            if asked == self._round:
                return
            self._round, self._answered_at = asked, time.monotonic()
        place = self._left_at or place_of_thread(self._watcher.main_thread)
        self._watcher.store.set(f"stacks/{asked}/{self._rank}", json.dumps(place))
        if self._left_at is None:
            who = f"Rank {self._rank} of {self._world_size} (process {os.getpid()} on {socket.gethostname()})"
            log.warning("%s is in %s. Its threads:\n%s", who, place.text, _stacks())


def summarize(places: Mapping[int, Place], world_size: int, if_all_wait: str = "") -> str:
    """Return where all ranks are, in one sentence.

    Ranks that wait for others come after the ranks for which they may wait, and ranks that gave no answer come last.

    Args:
        places: where each rank is that has answered.
        world_size: the number of ranks.
        if_all_wait: a sentence to add if all ranks wait for each other, in different places.
    """
    groups: dict[Place, list[int]] = {}
    for rank, place in sorted(places.items()):
        groups.setdefault(place, []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (group[0].waits, group[1]))
    parts = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} in {place.text}" for place, ranks in ordered]
    absent = [rank for rank in range(world_size) if rank not in places]
    if absent:
        parts.append(f"{name_ranks(absent)} {'has' if len(absent) == 1 else 'have'} not answered")
    text = "; ".join(parts)
    are_different = len(groups) > 1 and not absent and all(place.waits for place in groups)
    return f"{text[0].upper()}{text[1:]}." + (f" {if_all_wait}" if if_all_wait and are_different else "")


def _stacks() -> str:
    try:
        with tempfile.TemporaryFile("w+") as file:  # then logged in one piece: ranks write at the same time
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read().rstrip()
    except OSError as error:
        return f"not written: {error}"


# Where a thread is: in which line of the user's code, and in which call of a library below it


@cache
def library_of(path: str) -> str:
    """Return the name of the library to which the source file `path` belongs; an empty string for user code."""
    for name in LIBRARIES:
        module = sys.modules.get(name)
        location = getattr(module, "__file__", None) if module is not None else None
        if location and path.startswith(f"{Path(location).parent}{os.sep}"):
            return name
    site = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    is_standard = path.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen"))
    return "Python" if is_standard and not path.startswith(site) else ""


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first; an empty list if it has ended.

    The caller must not keep them: they keep the local variables of their functions.

    Args:
        thread: the identifier of the thread.
    """
    # Before Python 3.12, creating the object of a frame may collect garbage. A finalizer can then let the other thread
    # run and leave the function, and using the object crashes the process.
    is_paused = sys.version_info < (3, 12) and gc.isenabled()
    if is_paused:
        gc.disable()
    try:
        return [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]
    except KeyError:
        return []
    finally:
        if is_paused:
            gc.enable()


def place_of_thread(thread: int) -> Place:
    """Return where the thread with this identifier is."""
    return place_of((frame, frame.f_lineno) for frame in frames_of(thread))


def place_of(stack: Iterable[tuple[FrameType, int]]) -> Place:
    """Return the innermost line of the user's code in a stack, and the call of a library below it.

    Args:
        stack: the frames and their lines, innermost first.
    """
    inner, waits = "", False
    for frame, line in stack:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        library = library_of(path)
        if not library:
            where = f"{os.path.basename(path)}:{line}"
            own = where if name == "<module>" else f"`{name}` ({where})"
            return Place(f"{own}, in {inner}" if inner else own, waits)
        file = f"{library}/{path.replace(os.sep, '/').rpartition(f'/{library}/')[2]}"
        if not inner and library != "Python" and file not in _WRAPPERS:
            inner, waits = f"`{name}` ({file}:{line})", file.startswith(_WAITS)
    return Place(inner or "no line of Python code", waits)
