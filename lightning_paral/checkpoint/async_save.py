"""Save in the background: one save at a time, in a thread, over a process group of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_paral.checkpoint.io.staging import Staging
from lightning_paral.distributed.agreement import RankGroup, all_ranks


class BackgroundSaver:
    """Writes staged saves in a thread. Its construction makes a gloo group: *Collective* over the world.

    Args:
        timeout: how long to wait for other ranks.
        pin: whether to stage in pinned memory, for tensors on CUDA.
    """

    def __init__(self, timeout: timedelta, *, pin: bool = False) -> None:
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.staging = Staging(pin=pin)
        self._save: Future[None] | None = None
        self._later: list[Future[None]] = []

    def start(self, write: Callable[[RankGroup], None]) -> None:
        """Wait for the previous save, then call `write` in the thread.

        Raises:
            CheckpointError: the previous save failed.
        """
        self.wait()
        self._save = self._thread.submit(write, all_ranks(self._group))

    def after(self, action: Callable[[], None]) -> None:
        """Call `action` in the thread once the current save has succeeded; never if it fails."""
        save = self._save

        def act() -> None:
            if save is None or save.exception() is None:
                action()

        self._later.append(self._thread.submit(act))

    def wait(self) -> None:
        """Wait for the current save, and for the actions after it.

        Raises:
            CheckpointError: the save failed.
        """
        save, self._save = self._save, None
        later, self._later = self._later, []
        if save is not None:
            save.result()
        for action in later:
            action.result()

    def close(self) -> None:
        """Wait for the current save, then end the thread and free the staging memory.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.staging.release()
