"""All-reduce algorithms equal the sum in float64."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral import ConfigurationError
from lightning_paral.comm import ALL_REDUCE, count_traffic
from lightning_paral.comm.point_to_point import balanced_cuts
from lightning_paral.comm.ring import LEAST_CHUNK_BYTES, all_reduce_by_size

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)
WORLD_SIZES = (2, 3, 4)
LENGTHS = (0, 1, 3, 5, 97, 1000, 200_003)
OPERATIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def contribution(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator).to(dtype)
    return torch.randint(0, 60, (length,), generator=generator).to(dtype)


def expected(world: list[int], length: int, dtype: torch.dtype, operation: str) -> Tensor:
    total = torch.stack([contribution(rank, length, dtype).double() for rank in world]).sum(dim=0)
    if operation == "avg":
        total = total / len(world) if dtype.is_floating_point else (total / len(world)).trunc()
    return total


def largest_error(algorithm: str, operation: str) -> dict[str, float]:
    """Reduce every dtype and length; return the largest error by dtype, scaled by the size of the sum's terms."""
    world = list(range(dist.get_world_size()))
    errors = {}
    for dtype in DTYPES:
        for length in LENGTHS:
            tensor = contribution(dist.get_rank(), length, dtype)
            returned = ALL_REDUCE[algorithm](tensor, op=OPERATIONS[operation])
            assert returned is tensor
            error = (tensor.double() - expected(world, length, dtype, operation)).abs().max().item() if length else 0.0
            errors[str(dtype)] = max(errors.get(str(dtype), 0.0), error)
            assert_identical_on_all_ranks(tensor)
    return errors


def assert_identical_on_all_ranks(tensor: Tensor) -> None:
    gathered: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor)
    for other in gathered:
        assert other is not None
        assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))  # bits, not values


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_result_is_the_float64_sum_on_all_ranks(on_ranks, algorithm: str, operation: str, world_size: int) -> None:
    # Up to 4 terms of about 5 standard deviations; each addition errs by half a unit in the last place.
    allowed = {"torch.float64": 1e-14, "torch.float32": 1e-5, "torch.bfloat16": 0.13, "torch.float16": 0.02}

    for errors in on_ranks(world_size, largest_error, algorithm, operation):
        for dtype, error in errors.items():
            assert error <= allowed.get(dtype, 0.0), dtype


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_single_rank_keeps_its_tensor(on_ranks, algorithm: str) -> None:
    assert on_ranks(1, add_many_small_to_one_large, algorithm) == [1024.0]


def reduce_on_narrow_wire(algorithm: str, wire_dtype: torch.dtype) -> float:
    worst = 0.0
    for length in LENGTHS:
        tensor = contribution(dist.get_rank(), length, torch.float32)
        ALL_REDUCE[algorithm](tensor, op=dist.ReduceOp.AVG, wire_dtype=wire_dtype)
        if length:
            exact = expected(list(range(dist.get_world_size())), length, torch.float32, "avg")
            worst = max(worst, ((tensor.double() - exact).abs().max()).item())
        assert_identical_on_all_ranks(tensor)
    return worst


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("wire_dtype", "allowed"), [(torch.bfloat16, 0.06), (torch.float16, 0.006)])
@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_narrow_wire_rounds_messages_only(
    on_ranks, algorithm: str, wire_dtype: torch.dtype, allowed: float, world_size: int
) -> None:
    for error in on_ranks(world_size, reduce_on_narrow_wire, algorithm, wire_dtype):
        assert 0.0 < error <= allowed


def add_many_small_to_one_large(algorithm: str) -> float:
    """Return 1024 + 1 + 1 + 1: a bf16 accumulator would stay at 1024, where its unit in the last place is 8."""
    tensor = torch.full((64,), 1024.0 if dist.get_rank() == 0 else 1.0)
    ALL_REDUCE[algorithm](tensor, wire_dtype=torch.bfloat16)
    return tensor[0].item()


@pytest.mark.parametrize("algorithm", ["all_to_all"])
def test_contributions_are_added_in_fp32(on_ranks, algorithm: str) -> None:
    assert on_ranks(4, add_many_small_to_one_large, algorithm) == [1027.0] * 4


def sent_by_the_ring(length: int) -> int:
    """Return the bytes that our all-reduces send; gloo's own collectives are not counted."""
    tensor = torch.ones(length)
    with count_traffic() as traffic:
        all_reduce_by_size(tensor, wire_dtype=torch.bfloat16)
    assert (tensor == dist.get_world_size()).all()
    return traffic.payload_bytes


@pytest.mark.parametrize(
    ("world_size", "num_bytes", "is_ring"),
    [(2, 4, True), (3, 3 * LEAST_CHUNK_BYTES - 4, False), (3, 3 * LEAST_CHUNK_BYTES, True)],
)
def test_ring_reduces_large_tensors_only_unless_between_two_ranks(
    on_ranks, world_size: int, num_bytes: int, is_ring: bool
) -> None:
    sent = on_ranks(world_size, sent_by_the_ring, num_bytes // 4)

    assert any(sent) == is_ring


def average_near_the_limit_of_fp16(algorithm: str) -> bool:
    tensor = torch.full((1000,), 40_000.0)
    ALL_REDUCE[algorithm](tensor, op=dist.ReduceOp.AVG, wire_dtype=torch.float16)
    return bool((tensor - 40_000.0).abs().max() <= 16.0)


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_average_does_not_overflow_an_fp16_wire_where_the_sum_would(on_ranks, algorithm: str) -> None:
    assert all(on_ranks(3, average_near_the_limit_of_fp16, algorithm))


def reduce_in_pairs(algorithm: str) -> float:
    """Reduce in two groups at once: ranks 0 and 2, and ranks 1 and 3."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    tensor = torch.full((100,), float(10**rank))
    ALL_REDUCE[algorithm](tensor, groups[rank % 2])
    return tensor.unique().item()


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_subgroups_reduce_among_themselves(on_ranks, algorithm: str) -> None:
    assert on_ranks(4, reduce_in_pairs, algorithm) == [101.0, 1010.0, 101.0, 1010.0]


def sent_by(algorithm: str, length: int) -> tuple[int, int | None]:
    tensor = torch.ones(length)
    dist.barrier()
    with count_traffic() as traffic:
        ALL_REDUCE[algorithm](tensor)
        dist.barrier()
    return traffic.payload_bytes, traffic.socket_bytes


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("length", [1_200_000, 1_000_001])
def test_ring_sends_two_times_all_chunks_but_one(on_ranks, world_size: int, length: int) -> None:
    cuts = balanced_cuts(0, length, world_size)
    chunks = [end - start for start, end in pairwise(cuts)]

    for rank, (payload_bytes, _) in enumerate(on_ranks(world_size, sent_by, "ring", length)):
        # A rank does not send its own final chunk while summing, nor that of its right neighbor while gathering.
        expected_elements = 2 * length - chunks[(rank + 1) % world_size] - chunks[(rank + 2) % world_size]
        assert payload_bytes == 4 * expected_elements
        assert payload_bytes <= 4 * 2 * (world_size - 1) * -(-length // world_size)
        if length % world_size == 0:
            assert payload_bytes == 4 * 2 * (world_size - 1) * length // world_size


@pytest.mark.parametrize(
    ("tensor", "options", "message"),
    [
        (torch.ones(4, 4).t(), {}, "contiguous"),
        (torch.ones(4), {"op": dist.ReduceOp.MAX}, "ReduceOp.SUM and ReduceOp.AVG"),
        (torch.ones(4, dtype=torch.int32), {"wire_dtype": torch.bfloat16}, "floating-point"),
    ],
)
@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_bad_input_is_refused(algorithm: str, tensor: Tensor, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ALL_REDUCE[algorithm](tensor, **options)


def extra_memory(algorithm: str, length: int) -> int:
    """Return the peak number of bytes of tensors allocated inside an all-reduce."""
    tensor = torch.ones(length)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ALL_REDUCE[algorithm](tensor)
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("algorithm", ["ring", "reduce_broadcast", "all_to_all"])
def test_extra_memory_is_at_most_one_chunk(on_ranks, algorithm: str) -> None:
    length, world_size = 1_200_000, 4

    peaks = on_ranks(world_size, extra_memory, algorithm, length)

    assert 0 < max(peaks) <= 4 * length // world_size
