"""Check that our all-reduce algorithms return the sum, bit-identical on all ranks."""

import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_paral.comm import ALL_REDUCE
from tests.gpu.place import synchronize

LENGTHS = (1, 5, 1000, 3_000_001)


def reduction_error(algorithm: str, device: torch.device) -> tuple[float, bool]:
    """Return the largest error against a float64 sum, and whether all ranks hold the same bits. *Collective*."""
    worst, identical, world_size = 0.0, True, dist.get_world_size()
    for length in LENGTHS:
        terms = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(world_size)]
        tensor = terms[dist.get_rank()].to(device, copy=True)
        ALL_REDUCE[algorithm](tensor)
        exact = torch.stack(terms).double().sum(dim=0)
        worst = max(worst, (tensor.cpu().double() - exact).abs().max().item())
        others = [torch.empty_like(tensor) for _ in range(world_size)]
        dist.all_gather(others, tensor)
        identical = identical and all(torch.equal(other, tensor) for other in others)
    return worst, identical


def seconds_of(algorithm: str, device: torch.device, num_bytes: int) -> float:
    """Return the seconds of one all-reduce of `num_bytes` bytes, after one to warm up. *Collective*."""
    tensor = torch.ones(num_bytes // 4, device=device)
    for _ in range(2):
        dist.barrier()
        began = time.perf_counter()
        ALL_REDUCE[algorithm](tensor)
        synchronize(device.type)
    return time.perf_counter() - began


def facts(algorithm: str, device: torch.device, num_bytes: int) -> dict[str, Any]:
    """Return both results as a check does. *Collective*."""
    error, identical = reduction_error(algorithm, device)
    found: dict[str, Any] = {"failures": [], "error": error, "identical": identical}
    found[f"s for {num_bytes / 2**20:.1f} MiB"] = seconds_of(algorithm, device, num_bytes)
    if error > 1e-5 or not identical:
        found["failures"].append(f"{algorithm}: error {error:.3g}, same bits on all ranks: {identical}")
    return found
