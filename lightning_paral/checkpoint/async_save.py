"""Saving beside training: one save at a time, in a thread, on a process group of its own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_paral.checkpoint.io.staging import Staging
from lightning_paral.distributed.agreement import RankGroup, all_ranks


class BackgroundSaver:
    """Writes staged saves in the background. Creating it is *collective* over the world: it makes a gloo group.

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
        """Call `write` in the background, when the save before has ended.

        Raises:
            CheckpointError: the save before failed.
        """
        self.wait()
        self._save = self._thread.submit(write, all_ranks(self._group))

    def after(self, action: Callable[[], None]) -> None:
        """Call `action` when the save under way has succeeded; never if it fails."""
        save = self._save

        def act() -> None:
            if save is None or save.exception() is None:
                action()

        self._later.append(self._thread.submit(act))

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: it failed.
        """
        save, self._save = self._save, None
        later, self._later = self._later, []
        if save is not None:
            save.result()
        for action in later:
            action.result()

    def close(self) -> None:
        """Wait, then end the thread.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.staging.release()
