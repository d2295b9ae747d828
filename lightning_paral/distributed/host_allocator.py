"""Make the C library return large freed tensors to the system, so that freed shards really leave memory."""

import ctypes
import os
import platform
from collections.abc import Iterable
from typing import Any

from torch.nn.parameter import is_lazy

_M_MMAP_THRESHOLD = -3
RETURNED_WHILE_BUILDING = 2**20
"""Until the first optimizer step, allocations of at least this size return to the system when they are freed.

What is created until then, shards and optimizer states, stays: outside of the heap, it leaves no holes there.
"""
_LARGE_PARAMETER = 16 * 2**20


def return_large_tensors(least: int) -> None:
    """Let glibc return freed allocations of at least `least` bytes at once, for the rest of the process.

    By default glibc raises its threshold to up to 32 MiB when such an allocation is freed. From then on, freed tensors
    stay in its heap, which fragments: `fully_shard` on CPU then needs about as much memory as without sharding.
    Does nothing with another C library, or if the user has set the threshold in the environment.
    """
    if platform.libc_ver()[0] != "glibc" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    if "mmap_threshold" not in os.environ.get("GLIBC_TUNABLES", ""):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, least)


def returned_while_training(largest_parameter: int) -> int:
    """Return the size in bytes from which allocations return to the system in later steps.

    Mapping memory anew in each step takes time, which counts less the more a layer computes with it. At 4 MiB, a step
    of a model with weights of 16 MiB took no longer than at 8 MiB, and one of a small GPT up to a tenth longer.

    Args:
        largest_parameter: the size of the module's largest parameter in bytes, unsharded.
    """
    return (4 if largest_parameter >= _LARGE_PARAMETER else 8) * 2**20


class FreedInPieces:
    """Returns to the system what is freed between smaller allocations, when a fit begins and after its first step.

    After the first step it also raises the size from which tensors return by themselves, for the steps that follow.

    Building and sharding a module, and the first step, allocate optimizer states and shards between tensors that they
    free again. glibc keeps these holes. Later steps leave few new ones, so returning them once is enough: for a GPT of
    152 M parameters on two ranks they are a tenth of the memory, and each call takes some milliseconds.
    """

    def __init__(self) -> None:
        self._steps_at_begin: int | None = None
        self.is_done = platform.libc_ver()[0] != "glibc"
        """Whether `before_batch` has nothing more to do."""

    def before_batch(self, num_steps: int, parameters: Iterable[Any]) -> None:
        """Return freed memory if this batch is the first one, or the first one after an optimizer step.

        Args:
            num_steps: how many optimizer steps were taken, also in earlier fits.
            parameters: those of the module, which may be sharded.
        """
        if self.is_done or self._steps_at_begin == num_steps:
            return
        self.is_done = self._steps_at_begin is not None
        self._steps_at_begin = num_steps
        ctypes.CDLL(None).malloc_trim(0)
        if self.is_done:
            # DeepSpeed leaves parameters of no elements behind, with their number beside them.
            present = [each for each in parameters if not is_lazy(each)]
            sizes = [getattr(each, "ds_numel", each.numel()) * each.element_size() for each in present]
            return_large_tensors(returned_while_training(max(sizes, default=0)))
