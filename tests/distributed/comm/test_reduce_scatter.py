"""The direct reduce-scatter gives each rank its chunk of the sum, added in the order of ranks, in pieces."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral.comm import count_traffic, reduce_scatter
from lightning_paral.comm.reduce_scatter import DirectReduceScatter

LENGTHS = (0, 1, 5, 16, 97, 1000)
"""Elements of a chunk."""


@contextmanager
def arriving_at_a_time(num_bytes: int) -> Iterator[None]:
    before = reduce_scatter.ARRIVING_BYTES
    reduce_scatter.ARRIVING_BYTES = num_bytes  # type: ignore[misc]
    try:
        yield
    finally:
        reduce_scatter.ARRIVING_BYTES = before  # type: ignore[misc]


def contribution(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(dist.get_world_size() * length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def chunk_of_the_sum(length: int, dtype: torch.dtype) -> Tensor:
    total = contribution(0, length, dtype)
    for rank in range(1, dist.get_world_size()):
        total += contribution(rank, length, dtype)
    return total.view(dist.get_world_size(), length)[dist.get_rank()]


def reduce_all(piece_bytes: int, into_input: bool) -> int:
    """Reduce every length and dtype; return the number of wrong results."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_wrong = 0
    for length in LENGTHS:
        for dtype in (torch.float32, torch.bfloat16):
            tensor = contribution(rank, length, dtype)
            output = tensor.view(world_size, length)[rank] if into_input else torch.empty(length, dtype=dtype)
            with arriving_at_a_time(piece_bytes), count_traffic() as traffic:
                reduce_scatter.direct_reduce_scatter(output, tensor, dist.group.WORLD)
            num_wrong += not torch.equal(output, chunk_of_the_sum(length, dtype))
            num_wrong += not into_input and not torch.equal(tensor, contribution(rank, length, dtype))
            num_wrong += traffic.payload_bytes != (world_size - 1) * length * dtype.itemsize
    return num_wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("piece_bytes", [64, 2**20])
@pytest.mark.parametrize("into_input", [False, True])
def test_each_rank_gets_its_chunk_of_the_sum_bit_for_bit(
    on_ranks: Callable[..., list[Any]], world_size: int, piece_bytes: int, into_input: bool
) -> None:
    assert on_ranks(world_size, reduce_all, piece_bytes, into_input) == [0] * world_size


def extra_memory(length: int) -> int:
    tensor, output = torch.ones(length), torch.empty(length // dist.get_world_size())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        reduce_scatter.direct_reduce_scatter(output, tensor, dist.group.WORLD)
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return sum(size for size in sizes if size > 0)


def test_only_a_few_pieces_arrive_at_a_time(on_ranks: Callable[..., list[Any]]) -> None:
    length = 8 * 2**20  # 32 MiB, of which 24 MiB arrive at each of 4 ranks

    for found in on_ranks(4, extra_memory, length):
        assert 0 < found <= reduce_scatter.ARRIVING_BYTES


def averaged_by_fsdp() -> tuple[list[float], int]:
    reduce, world_size = DirectReduceScatter(), dist.get_world_size()
    inputs = reduce.allocate((4 * world_size,), dtype=torch.float32, device=torch.device("cpu"))
    outputs = reduce.allocate((4,), dtype=torch.float32, device=torch.device("cpu"))
    inputs.fill_(dist.get_rank() + 1.0)
    reduce(output_tensor=outputs, input_tensor=inputs, group=dist.group.WORLD, op=dist.ReduceOp.AVG)
    return outputs.tolist(), inputs.untyped_storage().nbytes()


def test_fsdp_gets_the_average_and_holds_no_memory_of_what_was_reduced(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(3, averaged_by_fsdp) == [([2.0] * 4, 0)] * 3
