"""`paral bench comm`: time collectives by algorithm, wire dtype and size, beside messages between two ranks."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm import ALL_REDUCE
from lightning_paral.comm.point_to_point import exchange, wait
from lightning_paral.comm.reduce_scatter import direct_reduce_scatter
from lightning_paral.comm.reduction import WIRE_DTYPES
from lightning_paral.comm.traffic import count_traffic
from lightning_paral.compat.torch.collectives import all_gather_single, reduce_scatter_single
from lightning_paral.diagnostics.bench.devices import device_and_backend
from lightning_paral.diagnostics.bench.names import check_names
from lightning_paral.diagnostics.bench.rank import Rank
from lightning_paral.errors import ConfigurationError
from lightning_paral.quantities import format_bytes

REDUCE_SCATTER = ("reduce_scatter_direct", "reduce_scatter_native")
"""Ours for gloo, and the backend's own."""
GATHERS = ("all_gather", "broadcast")
"""The backend's own: every rank has an equal part, or the first rank has all."""
ALGORITHMS = (*ALL_REDUCE, *REDUCE_SCATTER, *GATHERS)
FP32 = "fp32"
WIRES = (FP32, *WIRE_DTYPES)
DEFAULT_SIZES = tuple(2**exponent for exponent in range(16, 29, 2))
"""64 KiB to 256 MiB."""
COPIES = 4
"""How many times the size of a tensor a rank needs at most: the source, the tensor, and messages of both directions."""
_MOST_POINT_TO_POINT_BYTES = 2**26
_LEAST_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class CommRow:
    """The time of one algorithm."""

    algorithm: str
    wire: str
    """The dtype of messages."""
    size_bytes: int
    """The size of the fp32 tensor that is reduced, or that all ranks have in the end."""
    seconds: float
    """The median over rounds of the slowest rank's time."""
    num_rounds: int
    algbw: float
    """`size_bytes / seconds`, in bytes per second, as nccl-tests define it."""
    busbw: float
    """The bytes that each rank has to send, divided by the time: for N ranks, 2(N-1)/N of the tensor in an all-reduce,
    (N-1)/N in a reduce-scatter or an all-gather, and all of it in a broadcast, as nccl-tests define it, times the width
    of the wire dtype over that of fp32.
    """
    share: float
    """`busbw` divided by the bandwidth of messages from one rank to another."""
    sent_bytes: tuple[int, ...] | None
    """What each rank sends through sockets; `None` on GPUs, because NCCL uses no sockets within a node."""


@dataclass(frozen=True, kw_only=True)
class CommResults:
    """The result of `paral bench comm`."""

    num_ranks: int
    backend: str
    point_to_point_bandwidth: float
    """Bytes per second in messages from rank 0 to the last rank, while all else waits."""
    rows: tuple[CommRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "CommResults":
        """Return the results that `as_json` returned as `record`."""
        rows = tuple(CommRow(**(row | {"sent_bytes": _tuple(row["sent_bytes"])})) for row in record["rows"])
        return cls(**(record | {"rows": rows}))


def _tuple(found: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if found is None else tuple(found)


def check_comm(algorithms: Sequence[str], wires: Sequence[str], sizes: Sequence[int], num_ranks: int) -> None:
    """Check the options of the benchmark.

    Raises:
        ConfigurationError: a name is unknown, there is one rank only, or a size is too small.
    """
    check_names("--algorithms", algorithms, ALGORITHMS)
    check_names("--wire", wires, WIRES)
    if num_ranks < 2:
        raise ConfigurationError(f"--ranks {num_ranks}: collectives need at least 2 ranks.")
    least = 4 * num_ranks
    for size in sizes:
        if size < least:
            raise ConfigurationError(
                f"--sizes {size}: a tensor of {num_ranks} ranks needs an fp32 element for each, which are {least} "
                "bytes. Give larger sizes."
            )


def measure_comm(
    rank: Rank, *, algorithms: Sequence[str], wires: Sequence[str], sizes: Sequence[int], rounds: int, seconds: float
) -> dict[str, Any]:
    """Measure in rounds over all algorithms, so that other load falls on all of them. *Collective* over all ranks.

    Args:
        rank: this rank.
        algorithms: names from `ALGORITHMS`. Only an all-reduce is measured in other dtypes than fp32.
        wires: names from `WIRES`.
        sizes: the sizes of the fp32 tensors in bytes.
        rounds: the number of rounds for each size.
        seconds: the time after which a size gets no further rounds, if it has had three.

    Returns:
        `CommResults` for JSON, the same on all ranks.
    """
    device, backend = device_and_backend()
    group = rank.join_group(backend)
    bandwidth = _point_to_point_bandwidth(rank, group, min(max(sizes), _MOST_POINT_TO_POINT_BYTES), device)
    cases = [
        (algorithm, wire)
        for algorithm, wire in itertools.product(algorithms, wires)
        if wire == FP32 or algorithm in ALL_REDUCE
    ]
    rows = []
    for size in sizes:
        num_elements = size // 4 // rank.world_size * rank.world_size
        source = torch.randn(num_elements, device=device)
        tensor = torch.empty_like(source)
        times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        sent: dict[tuple[str, str], tuple[int, ...] | None] = {}
        began = time.perf_counter()
        for number in range(rounds + 1):
            for algorithm, wire in cases:
                rank.show_progress(f"{format_bytes(size)}, round {number} of {rounds}: {algorithm}, {wire}")
                tensor.copy_(source)
                run = partial(_run, algorithm, wire, tensor, group)
                if number:
                    times[algorithm, wire].append(_timed(run, group, device))
                else:  # the first round warms up
                    sent[algorithm, wire] = _sent_bytes(run, group, device)
            if number >= _LEAST_ROUNDS and _slowest(time.perf_counter() - began, group, device) > seconds:
                break
        rows += [
            comm_row(
                case,
                tensor.nbytes,
                statistics.median(found),
                num_rounds=len(found),
                world_size=rank.world_size,
                bandwidth=bandwidth,
                sent_bytes=sent[case],
            )
            for case, found in times.items()
        ]
    dist.destroy_process_group()
    return CommResults(
        num_ranks=rank.world_size, backend=backend, point_to_point_bandwidth=bandwidth, rows=tuple(rows)
    ).as_json()


def comm_row(
    case: tuple[str, str],
    size: int,
    seconds: float,
    *,
    num_rounds: int,
    world_size: int,
    bandwidth: float,
    sent_bytes: tuple[int, ...] | None = None,
) -> CommRow:
    """Return the row of a measured time.

    Args:
        case: the algorithm and the wire dtype.
        size: the size of the fp32 tensor in bytes.
        seconds: the median time.
        num_rounds: the number of rounds.
        world_size: the number of ranks.
        bandwidth: bytes per second in messages from one rank to another.
        sent_bytes: what each rank sends.
    """
    algorithm, wire = case
    share = 1.0 if algorithm == "broadcast" else (world_size - 1) / world_size
    passes = 2 if algorithm in ALL_REDUCE else 1
    width = 1.0 if wire == FP32 else WIRE_DTYPES[wire].itemsize / 4
    busbw = size * width * passes * share / seconds
    return CommRow(
        algorithm=algorithm,
        wire=wire,
        size_bytes=size,
        seconds=seconds,
        num_rounds=num_rounds,
        algbw=size / seconds,
        busbw=busbw,
        share=busbw / bandwidth,
        sent_bytes=sent_bytes,
    )


def _run(algorithm: str, wire: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
    if algorithm in ALL_REDUCE:
        ALL_REDUCE[algorithm](tensor, group, wire_dtype=WIRE_DTYPES.get(wire))
        return
    if algorithm == "broadcast":
        dist.broadcast(tensor, group_src=0, group=group)
        return
    part = tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    if algorithm == "all_gather":
        all_gather_single(tensor, part.clone(), group=group)
    elif algorithm == "reduce_scatter_direct":
        direct_reduce_scatter(torch.empty_like(part), tensor, group)
    else:
        reduce_scatter_single(torch.empty_like(part), tensor, group=group)


def _point_to_point_bandwidth(rank: Rank, group: dist.ProcessGroup, size: int, device: torch.device) -> float:
    """Return the bytes per second from the first to the last rank, in the fastest of some messages."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    last = rank.world_size - 1

    def send() -> None:
        if rank.rank in (0, last):
            pair = [(message, last if rank.rank == 0 else 0)]
            wait(*(exchange(pair, [], group) if rank.rank == 0 else exchange([], pair, group)))

    rank.show_progress("messages from one rank to another")
    return size / min([_timed(send, group, device) for _ in range(6)][1:])


def _timed(function: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds that the slowest rank took. *Collective* over `group`."""
    dist.barrier(group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _slowest(time.perf_counter() - began, group, device)


def _sent_bytes(function: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> tuple[int, ...] | None:
    """Call `function`, and return what each rank sends while it runs. *Collective* over `group`."""
    dist.barrier(group)
    with count_traffic() as traffic:
        function()
        dist.barrier(group)
    if device.type == "cuda":
        return None
    number = traffic.payload_bytes if traffic.socket_bytes is None else traffic.socket_bytes
    found = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    found[dist.get_rank(group)] = number
    dist.all_reduce(found, group=group)
    return tuple(found.tolist())


def _slowest(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found.item())
