"""Compare the replicas of parameters every few optimizer steps: the option `divergence_check_every`."""

from collections.abc import Callable, Mapping
from itertools import chain

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_paral.distributed.differences.same_on_ranks import digest_of
from lightning_paral.distributed.host_exchange import gather_int_lists, gather_objects
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.process_group import host_group
from lightning_paral.distributed.rank_names import name_ranks
from lightning_paral.errors import ConfigurationError

Replicas = Mapping[str, tuple[Tensor, int]]
_CHUNK = 1 << 20
_ODD = 0x5851F42D4C957F2D  # the multiplier of Knuth's MMIX generator
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """Compares checksums of the bits of replicas, in one collective per check.

    Args:
        every: the number of optimizer steps between two checks.
        find: returns by name the tensors of this rank that have replicas, each with a number: 0 if it is in full, and
            otherwise that of the ranks that have this shard. Ranks with the same name and number must have equal
            values. All ranks have the same number of different numbers.
        dims: the arrangement of the ranks. Ranks of different pipeline stages are not compared.
    """

    def __init__(self, every: int, find: Callable[[], Replicas], dims: ParallelDims) -> None:
        self._every = every
        self._find = find
        self._dims = dims
        self._has_warned = False

    def after_step(self, step: int) -> None:
        """Compare the replicas if `step` optimizer steps have run and a check is due. If so, *collective*.

        Raises:
            ConfigurationError: replicas differ. The message names the first parameter, the ranks and the step.
        """
        if step and step % self._every == 0:
            self.check(step)

    def check(self, step: int) -> None:
        """Compare the replicas after optimizer step number `step`. *Collective* over the world.

        Raises:
            ConfigurationError: replicas differ. The message names the first parameter, the ranks and the step.
        """
        replicas = self._find()
        if not replicas and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"divergence_check_every={self._every} has no effect: all parameters are sharded, and no two ranks "
                "have the same part of one."
            )
        sums = _checksums(replicas)
        by_number: dict[int, list[tuple[str, int]]] = {0: []}
        for (name, number), value in sorted(sums.items()):
            by_number.setdefault(number, []).append((name, value))
        numbers = [each for number, values in by_number.items() for each in (number, digest_of(values))]
        group = self._dims.stage_group() or host_group()
        rows = gather_int_lists(numbers, group)
        digests: dict[int, set[int]] = {}
        for row in rows:
            for number, digest in zip(row[::2], row[1::2], strict=True):
                digests.setdefault(number, set()).add(digest)
        if all(len(of_number) == 1 for of_number in digests.values()):
            return
        by_rank = dict(zip(self._dims.stage_ranks, gather_objects(sums, group), strict=True))
        raise ConfigurationError(_describe(by_rank, step))


def _checksums(replicas: Replicas) -> dict[tuple[str, int], int]:
    """Return the checksum of each tensor, by name and number, with one wait for each device."""
    by_device: dict[torch.device, list[tuple[tuple[str, int], Tensor]]] = {}
    for name, (tensor, shard) in replicas.items():
        by_device.setdefault(tensor.device, []).append(((name, shard), checksum(tensor)))
    sums: dict[tuple[str, int], int] = {}
    for entries in by_device.values():
        keys = [key for key, _ in entries]
        sums |= dict(zip(keys, torch.stack([value for _, value in entries]).tolist(), strict=True))
    return {(name, shard): sums[name, shard] for name, (_, shard) in replicas.items()}


def _describe(by_rank: Mapping[int, Mapping[tuple[str, int], int]], step: int) -> str:
    for key in dict.fromkeys(chain.from_iterable(by_rank.values())):
        values = {rank: sums[key] for rank, sums in by_rank.items() if key in sums}
        if len(set(values.values())) > 1:
            groups = [[rank for rank, value in values.items() if value == each] for each in set(values.values())]
            groups.sort(key=lambda ranks: (-len(ranks), ranks))
            of = " and ".join(name_ranks(ranks) for ranks in (groups[0], sorted(chain.from_iterable(groups[1:]))))
            return (
                f"After optimizer step {step} of this run, the values of `{key[0]}` differ between {of}. They must be "
                "equal bit by bit. Look for code that writes to parameters, gradients or optimizers on some ranks "
                "only, or with random numbers or data of the rank."
            )
    return f"After optimizer step {step} of this run, the ranks do not have the same parameters."


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of the bits and positions of the elements of `tensor`: an int64 of 0 dimensions on its device.

    Equal bits give equal checksums on every device, also of NaN. It needs about 16 MiB of memory on the device.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    size = flat.element_size()
    words = flat.view(_WORDS.get(size, torch.int64))
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    # Sums of int64 wrap around, modulo 2**64, so their order does not matter. Odd factors keep each single difference.
    factors = (2 * torch.arange(min(_CHUNK, words.numel()), dtype=torch.int64, device=tensor.device) + 1) * _ODD
    for number, chunk in enumerate(torch.split(words, _CHUNK)):
        total = total + (chunk.to(torch.int64) * factors[: chunk.numel()]).sum() * (2 * number + 1)
    return total
