"""Operations that draw random numbers draw on shards what one process draws, for every layout of the shards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_paral.compat.torch.dtensor import operation_handlers
from lightning_paral.engines.fsdp.sharded_ops import handlers

DRAWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.clone().normal_(),
    lambda x: x.clone().uniform_(),
    lambda x: x.clone().bernoulli_(0.5),
    lambda x: x.clone().exponential_(),
    torch.rand_like,
    torch.randn_like,
    torch.bernoulli,
    torch.nn.functional.dropout,
)
PLACEMENTS: dict[int, list[list[Any]]] = {
    1: [[Shard(0)], [Shard(1)]],
    2: [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Shard(1), Replicate()]],
}


@contextmanager
def our_handlers() -> Iterator[None]:
    registered = operation_handlers()
    before = dict(registered)
    registered.update(handlers(lambda: False))
    try:
        yield
    finally:
        registered.clear()
        registered.update(before)


def drawn(given: Tensor) -> list[Tensor]:
    results = []
    for draw in DRAWS:
        torch.manual_seed(3)
        results.append(draw(given))
    return results


def values() -> Tensor:
    return torch.linspace(0.1, 0.9, 35).view(5, 7)


def drawn_on_shards(num_dimensions: int) -> list[list[Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // num_dimensions, 2)[-num_dimensions:])
    with our_handlers(), torch.no_grad():
        return [
            [result.full_tensor() for result in drawn(distribute_tensor(values(), mesh, placements))]
            for placements in PLACEMENTS[num_dimensions]
        ]


@pytest.mark.parametrize(("num_ranks", "num_dimensions"), [(2, 1), (4, 2)])
def test_draws_on_shards_equal_one_process(on_ranks, num_ranks: int, num_dimensions: int) -> None:
    for by_placement in on_ranks(num_ranks, drawn_on_shards, num_dimensions):
        for found in by_placement:
            torch.testing.assert_close(found, drawn(values()), rtol=0.0, atol=0.0)
