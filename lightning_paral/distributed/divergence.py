"""Notice that ranks part during a fit: other steps in an epoch, or other values of replicas."""

import json
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_paral.distributed.exchange import gather_int_lists, gather_objects, name_ranks, values_by_rank
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.watcher import RankWatcher
from lightning_paral.errors import ConfigurationError, ProcessGroupError

_SAME_STEPS = (
    "All ranks must run the same steps, because gradients are averaged over all of them. Do not skip a batch or end an "
    "epoch on some ranks only: give all ranks the same number of batches, return -1 from on_train_batch_start on all "
    "ranks or on none, and in manual optimization run the backward pass of a zero loss (0 * loss) instead of skipping "
    "it."
)
_ALL = "all have ended it"
_COUNTED = ("epochs", "training steps", "backward passes", "optimizer steps")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.2
"""Seconds between two looks at the store."""

Replicas = Mapping[str, tuple[Tensor, int]]
_CHUNK = 1 << 20
_ODD = 0x5851F42D4C957F2D  # the multiplier of Knuth's MMIX generator
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class EpochAgreement:
    """Compares the progress of the ranks at the end of each epoch: a `Topic` of the watcher.

    A rank that ends the epoch waits, through the store, until all ranks have ended it. Then they compare what they have
    counted. The watcher of a rank that has begun another batch instead tells those that wait, because its main thread
    soon waits for them in a collective.

    Args:
        watcher: the watcher of the run.
        timeout: how long to wait for the others.
        num_batches: returns the number of batches that have begun. It is called in several threads.
    """

    def __init__(self, watcher: RankWatcher, timeout: timedelta, num_batches: Callable[[], int]) -> None:
        self.backwards = 0
        """Backward passes that have begun in the run."""
        self.optimizer_steps = 0
        """Optimizer steps that have ended in the run."""
        self._watcher = watcher
        self._timeout = timeout
        self._num_batches = num_batches
        self._number = 0
        """The number of epochs that this rank has ended in the run."""

    def end_epoch(self, current: int) -> None:
        """Wait until all ranks have ended the epoch. *Collective* over the world.

        Args:
            current: the epoch.

        Raises:
            ConfigurationError: a rank continues with the epoch, or has run a different number of steps. The message
                names the ranks.
            ProcessGroupError: a rank has not ended the epoch within the timeout.
        """
        store: Any = self._watcher.main_store
        self._number += 1
        epoch, num_batches = f"epochs/{self._number}", self._num_batches()
        store.set(f"{epoch}/{self._watcher.rank}", "")
        store.set("epochs/latest", json.dumps([self._number, current, num_batches]))
        if store.add(f"{epoch}/ended", 1) == self._watcher.world_size:
            store.compare_set(f"{epoch}/verdict", "", _ALL)
        deadline, pause = time.monotonic() + self._timeout.total_seconds(), _FIRST_PAUSE
        while not store.check([f"{epoch}/verdict"]):
            if time.monotonic() > deadline:
                absent = sorted(set(range(self._watcher.world_size)) - set(self._ended(store, self._number)))
                raise ProcessGroupError(
                    f"The end of epoch {current} timed out after {self._timeout}: {name_ranks(absent)} did "
                    f"not end it. {_SAME_STEPS}"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)  # so that many ranks that wait long do not keep the store busy
        verdict = store.get(f"{epoch}/verdict").decode()
        if verdict != _ALL:
            raise ConfigurationError(f"{verdict} {_SAME_STEPS}")
        counts = gather_int_lists([current, num_batches, self.backwards, self.optimizer_steps])
        for name, of_ranks in zip(_COUNTED, zip(*counts, strict=True), strict=True):
            if len(set(of_ranks)) > 1:
                values = values_by_rank(dict(enumerate(map(str, of_ranks))))
                told = f"Until the end of epoch {current}, the number of {name} is {values}."
                raise ConfigurationError(f"{told} {_SAME_STEPS}")

    def poll(self, store: Any) -> None:
        """Tell the others if they have ended an epoch in which this rank has begun another batch."""
        if not store.check(["epochs/latest"]):
            return
        number, epoch, num_batches = json.loads(store.get("epochs/latest"))
        # In this order: the main thread ends the epoch before it begins a batch of the next one.
        if self._num_batches() > num_batches and self._number < number:
            verdict = (
                f"In epoch {epoch}, {name_ranks(self._ended(store, number))} ended the epoch after {num_batches} "
                f"training steps, while {name_ranks([self._watcher.rank])} began another batch."
            )
            store.compare_set(f"epochs/{number}/verdict", "", verdict)

    def _ended(self, store: Any, number: int) -> list[int]:
        """Return the ranks that have ended the epoch."""
        return [rank for rank in range(self._watcher.world_size) if store.check([f"epochs/{number}/{rank}"])]

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as `None`, because it belongs to one run in one process."""
        return type(None), ()


class ReplicaCheck:
    """Compares checksums of the bits of replicas: the option `divergence_check_every`.

    Args:
        every: the number of optimizer steps between two checks.
        find: returns by name the tensors of this rank that have replicas, each with a number: 0 if it is in full, and
            otherwise that of the ranks that have this shard. Ranks with the same name and number must have equal
            values.
        dims: the arrangement of the ranks. Ranks of different pipeline stages are not compared.
    """

    def __init__(self, every: int, find: Callable[[], Replicas], dims: ParallelDims) -> None:
        self._every, self._find, self._dims = every, find, dims
        self._has_warned = False

    def after_step(self, step: int) -> None:
        """Compare the replicas if `step` optimizer steps have run and a check is due. If so, *collective*.

        Raises:
            ConfigurationError: replicas differ. The message names the first parameter, the ranks and the step.
        """
        if not step or step % self._every:
            return
        replicas = self._find()
        if not replicas and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"divergence_check_every={self._every} has no effect: all parameters are sharded, and no two ranks "
                "have the same part of one."
            )
        keys = [(name, number) for name, (_, number) in replicas.items()]
        sums = [checksum(tensor) for tensor, _ in replicas.values()]
        on_host = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []  # one wait
        gathered = gather_objects(dict(zip(keys, on_host, strict=True)), self._dims.stage_group())
        for key in dict.fromkeys(chain.from_iterable(gathered)):
            ranks_by_sum: dict[int, list[int]] = {}
            for rank, of_rank in zip(self._dims.stage_ranks, gathered, strict=True):
                if key in of_rank:
                    ranks_by_sum.setdefault(of_rank[key], []).append(rank)
            if len(ranks_by_sum) > 1:
                raise ConfigurationError(
                    f"After optimizer step {step} of this run, the values of `{key[0]}` differ between "
                    f"{' and '.join(map(name_ranks, ranks_by_sum.values()))}. They must be equal bit by bit. Look for "
                    "code that writes to parameters, gradients or optimizers on some ranks only, or with random "
                    "numbers or data of the rank."
                )


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of the bits and positions of the elements of `tensor`: an int64 of 0 dimensions on its device.

    Equal bits give equal checksums on every device, also of NaN. It needs about 16 MiB of memory on the device.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.int64))
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    # Sums of int64 wrap around, modulo 2**64, so their order does not matter. Odd factors keep each single difference.
    factors = (2 * torch.arange(min(_CHUNK, words.numel()), dtype=torch.int64, device=tensor.device) + 1) * _ODD
    for number, chunk in enumerate(torch.split(words, _CHUNK)):
        total = total + (chunk.to(torch.int64) * factors[: chunk.numel()]).sum() * (2 * number + 1)
    return total
