"""Save in the background: copies of what a save writes, and one thread with a separate process group."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.checkpoint.shards import LocalShard, identity
from lightning_paral.checkpoint.tree import SavedTensor
from lightning_paral.distributed.exchange import RankGroup, all_ranks


class Staging:
    """Copies on the host of the shards that a rank writes.

    The memory is kept for the next save, because allocating it takes longer than copying to it.

    Args:
        pin: whether to use pinned memory, to which a GPU copies without waiting.
    """

    def __init__(self, *, pin: bool = False) -> None:
        self._pin = pin
        self._copies: list[Tensor] = []

    def stage(self, tensors: list[SavedTensor]) -> None:
        """Copy the shards of `tensors`, and replace them by the copies. Earlier copies are overwritten."""
        kept, self._copies = self._copies, []
        for tensor in tensors:
            if not tensor.shard.chunks:
                continue
            values = tensor.shard.values()
            copy = kept[len(self._copies)] if len(self._copies) < len(kept) else None
            if copy is None or (copy.shape, copy.dtype) != (values.shape, tensor.dtype):
                copy = torch.empty(values.shape, dtype=tensor.dtype, device="cpu", pin_memory=self._pin)
            self._copies.append(copy.copy_(values, non_blocking=self._pin))
            tensor.shard = LocalShard(tensor.shard.chunks, partial(identity, copy))
        if self._pin:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Free the memory."""
        self._copies.clear()


class BackgroundSaver:
    """Writes staged saves in a thread. The constructor creates a gloo group: *Collective* over the world.

    Args:
        timeout: the timeout of the gloo group.
        pin: whether to stage tensors in pinned memory; useful if they are on CUDA.
    """

    def __init__(self, timeout: timedelta, *, pin: bool = False) -> None:
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.staging = Staging(pin=pin)
        self._save: Future[None] | None = None
        self._actions: list[Future[None]] = []

    def start(self, write: Callable[[RankGroup], None]) -> None:
        """Wait for the previous save, then call `write` in the thread with the group of all ranks, over gloo.

        Raises:
            CheckpointError: the previous save failed.
        """
        self.wait()
        self._save = self._thread.submit(write, all_ranks(self._group))

    def after(self, action: Callable[[], None]) -> None:
        """Call `action` in the thread after the current save. If the save fails, `action` is not called."""
        save = self._save

        def act_on_success() -> None:
            if save is None or save.exception() is None:
                action()

        self._actions.append(self._thread.submit(act_on_success))

    def wait(self) -> None:
        """Wait for the current save and for the actions registered by `after`.

        Raises:
            CheckpointError: the save failed.
        """
        save, self._save = self._save, None
        actions, self._actions = self._actions, []
        if save is not None:
            save.result()
        for action in actions:
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
