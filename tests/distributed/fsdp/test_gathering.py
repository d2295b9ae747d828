"""Sharded tensors are gathered into host memory in slices of bounded size."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_paral.engines.fsdp.gather import GatherToHost

SHAPES = [(7, 3), (1, 5), (4,), (9, 2, 3), (3, 1), (8, 16)]


class InSmallPieces(GatherToHost):
    piece_bytes = 48


def gathered(num_copies: int) -> list[tuple[bool, bool]]:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_copies, world_size // num_copies), mesh_dim_names=("replicate", "shard"))
    shards = mesh["shard"]
    of_shards, everyone = dist.get_process_group_ranks(shards.get_group()), list(range(world_size))
    found = []
    for number, shape in enumerate(SHAPES):
        value = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)
        tensor = distribute_tensor(value, shards, [Shard(0)], src_data_rank=None)
        of_group: Tensor = InSmallPieces(shards.get_group(), of_shards)(tensor)
        of_all = InSmallPieces(dist.group.WORLD, everyone, on_host=True)(tensor)
        found.append((torch.equal(of_group, value), torch.equal(of_all, value)))
    return found


def test_rows_are_in_order_for_every_shape(on_ranks) -> None:
    for found in [*on_ranks(2, gathered, 1), *on_ranks(4, gathered, 2)]:
        assert found == [(True, True)] * len(SHAPES)
