"""The gradient scaler of FSDP unscales shards, and ranks skip a step together."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_paral.distributed.mesh import ParallelDims, make_mesh
from lightning_paral.engines.fsdp.gradients import ShardedScaler


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sharded_parameters() -> list[nn.Parameter]:
    """Return parameters with gradients, the first two sharded."""
    dims = ParallelDims(rank=dist.get_rank(), shard=dist.get_world_size())
    mesh = make_mesh(torch.device("cpu"), dims)
    parameters = []
    for gradient in (values(1, 5, 3), values(2, 4), values(3)):
        made = distribute_tensor(gradient, mesh, [Shard(0)]) if gradient.dim() else gradient
        parameter = nn.Parameter(torch.zeros_like(made))
        parameter.grad = made
        parameters.append(parameter)
    return parameters


def step_with_scaler(poisoned_rank: int | None) -> list[Tensor]:
    parameters = sharded_parameters()
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = ShardedScaler(device="cpu", init_scale=8.0)
    scaler.scale(torch.zeros(1))
    if dist.get_rank() == poisoned_rank:
        parameters[0].grad.to_local()[0, 0] = torch.inf
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (8.0 if poisoned_rank is None else 4.0)
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in parameters]


def test_scaler_unscales_shards_and_all_ranks_skip_together(on_ranks) -> None:
    expected = [-values(1, 5, 3) / 8, -values(2, 4) / 8, -values(3) / 8]

    for stepped in on_ranks(2, step_with_scaler, None):
        torch.testing.assert_close(stepped, expected)
    for skipped in on_ranks(2, step_with_scaler, 1):
        assert all(not parameter.any() for parameter in skipped)
