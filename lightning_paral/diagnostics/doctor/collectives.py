"""The collectives that the doctor runs: each fills tensors, communicates, and checks what arrived."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm.ring import ring_all_reduce
from lightning_paral.compat.torch.collectives import all_gather_single, reduce_scatter_single

SMALL_BYTES, LARGE_BYTES = 8, 4 * 2**20
"""Sizes of the larger of input and output, for latency and bandwidth; rounded up to one fp32 element per rank."""

_SMALL_REPEATS, _LARGE_REPEATS = 20, 4


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank among the others, in the default process group."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def total(self) -> int:
        """The sum of `rank + 1` over all ranks."""
        return self.world_size * (self.world_size + 1) // 2

    def filled(self, numel: int, value: float) -> Tensor:
        """Return an fp32 tensor of one value."""
        return torch.full((numel,), float(value), device=self.device)

    def chunks(self, numel: int, value: Callable[[int], float]) -> Tensor:
        """Return a tensor with a chunk for each rank; `value` maps a rank to the value of its chunk."""
        values = torch.tensor([float(value(rank)) for rank in range(self.world_size)], device=self.device)
        return values.repeat_interleave(numel // self.world_size)


Run = tuple[Callable[[], object], Callable[[], bool]]
"""A function that communicates, and one that says whether the result of its first call is right."""


def _broadcast(ranks: Ranks, numel: int) -> Run:
    tensor = ranks.filled(numel, ranks.rank + 1)
    return lambda: dist.broadcast(tensor, src=0), lambda: _is(tensor, 1)


def _all_reduce(ranks: Ranks, numel: int) -> Run:
    tensor = ranks.filled(numel, ranks.rank + 1)
    return lambda: dist.all_reduce(tensor), lambda: _is(tensor, ranks.total)


def _reduce(ranks: Ranks, numel: int) -> Run:
    tensor = ranks.filled(numel, ranks.rank + 1)
    return lambda: dist.reduce(tensor, dst=0), lambda: ranks.rank != 0 or _is(tensor, ranks.total)


def _all_gather(ranks: Ranks, numel: int) -> Run:
    mine = ranks.filled(numel // ranks.world_size, ranks.rank + 1)
    everything, expected = ranks.filled(numel, 0), ranks.chunks(numel, lambda rank: rank + 1)
    return lambda: all_gather_single(everything, mine), lambda: torch.equal(everything, expected)


def _reduce_scatter(ranks: Ranks, numel: int) -> Run:
    everything, mine = ranks.filled(numel, ranks.rank + 1), ranks.filled(numel // ranks.world_size, 0)
    return lambda: reduce_scatter_single(mine, everything), lambda: _is(mine, ranks.total)


def _all_to_all(ranks: Ranks, numel: int) -> Run:
    size, own = ranks.world_size, ranks.rank
    sent, received = ranks.chunks(numel, lambda rank: own * size + rank), ranks.filled(numel, -1)
    expected = ranks.chunks(numel, lambda rank: rank * size + own)
    return lambda: dist.all_to_all_single(received, sent), lambda: torch.equal(received, expected)


def _gather(ranks: Ranks, numel: int) -> Run:
    mine = ranks.filled(numel // ranks.world_size, ranks.rank + 1)
    everything = [torch.zeros_like(mine) for _ in range(ranks.world_size)] if ranks.rank == 0 else None
    return (
        lambda: dist.gather(mine, everything, dst=0),
        lambda: all(_is(each, rank + 1) for rank, each in enumerate(everything or ())),
    )


def _scatter(ranks: Ranks, numel: int) -> Run:
    mine = ranks.filled(numel // ranks.world_size, 0)
    everything = None
    if ranks.rank == 0:
        everything = [torch.full_like(mine, rank + 1) for rank in range(ranks.world_size)]
    return lambda: dist.scatter(mine, everything, src=0), lambda: _is(mine, ranks.rank + 1)


def _send_receive(ranks: Ranks, numel: int) -> Run:
    right, left = (ranks.rank + 1) % ranks.world_size, (ranks.rank - 1) % ranks.world_size
    sent, received = ranks.filled(numel, ranks.rank), ranks.filled(numel, -1)

    def run() -> None:
        operations = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return run, lambda: _is(received, left)


def _barrier(ranks: Ranks, numel: int) -> Run:
    devices = [ranks.device.index] if ranks.device.type == "cuda" else None
    return lambda: dist.barrier(device_ids=devices), lambda: True


def _ring(ranks: Ranks, numel: int) -> Run:
    tensor = ranks.filled(numel, ranks.rank + 1)
    return lambda: ring_all_reduce(tensor), lambda: _is(tensor, ranks.total)


COLLECTIVES: dict[str, Callable[[Ranks, int], Run]] = {
    "broadcast": _broadcast,
    "all-reduce": _all_reduce,
    "reduce": _reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "send/recv": _send_receive,
    "barrier": _barrier,
    "ring all-reduce": _ring,
}
"""Functions that prepare a collective for a number of elements, divisible by the world size."""

BETWEEN_TWO = ("send/recv",)
"""Those that need two ranks."""

WITHOUT_DATA = ("barrier",)
"""Those that have a latency and no bandwidth."""


def measure(name: str, ranks: Ranks) -> dict[str, float]:
    """Run a collective with small and large tensors. *Collective* over the default process group.

    Returns:
        The seconds per call with `SMALL_BYTES` (`"small"`) and `LARGE_BYTES` (`"large"`) on this rank.

    Raises:
        RuntimeError: the collective failed, or the result is wrong.
    """
    seconds = {"small": _time(name, ranks, SMALL_BYTES, _SMALL_REPEATS)}
    if name not in WITHOUT_DATA:
        seconds["large"] = _time(name, ranks, LARGE_BYTES, _LARGE_REPEATS)
    return seconds


def _time(name: str, ranks: Ranks, num_bytes: int, repeats: int) -> float:
    per_rank = max(1, num_bytes // 4 // ranks.world_size)
    run, is_right = COLLECTIVES[name](ranks, per_rank * ranks.world_size)
    run()
    if not is_right():
        raise RuntimeError(f"it answered, but the values of {num_bytes:,} bytes are wrong")
    _synchronize(ranks.device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    _synchronize(ranks.device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is(tensor: Tensor, value: float) -> bool:
    return bool((tensor == value).all())
