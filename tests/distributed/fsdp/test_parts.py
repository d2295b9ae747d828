"""Components of the FSDP engine: the gradient scaler, averaged gradients, norms, and recovery after a failure."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_paral.distributed.mesh import ParallelDims, make_mesh
from lightning_paral.engines.fsdp.precision import ShardedScaler
from lightning_paral.model.clipping import clip_by_norm, clip_by_value
from lightning_paral.model.full_tensors import gradient_norm

CPU = torch.device("cpu")


def dims_of(replicate: int) -> ParallelDims:
    size = dist.get_world_size()
    return ParallelDims(rank=dist.get_rank(), replicate=replicate, shard=size // replicate)


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sharded_parameters(replicate: int = 1) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return parameters with gradients, the first two sharded, and their full gradients."""
    mesh = make_mesh(CPU, dims_of(replicate))
    whole = [values(1, 5, 3), values(2, 4), values(3)]
    placements = [Shard(0)] if replicate == 1 else None
    parameters = []
    for gradient in whole:
        if gradient.dim() == 0:
            parameter = nn.Parameter(torch.zeros(()))
            parameter.grad = gradient.clone()
        else:
            kinds = placements or [Replicate(), Shard(0)]
            parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, kinds))
            parameter.grad = distribute_tensor(gradient, mesh, kinds)
        parameters.append(parameter)
    return parameters, whole


def full(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]


def clip(replicate: int) -> None:
    parameters, whole = sharded_parameters(replicate)
    expected = [nn.Parameter(torch.zeros_like(gradient)) for gradient in whole]
    for parameter, gradient in zip(expected, whole, strict=True):
        parameter.grad = gradient.clone()

    norm = clip_by_norm(parameters, 0.5)

    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(expected, 0.5))
    torch.testing.assert_close(full(parameters), [parameter.grad for parameter in expected])
    torch.testing.assert_close(gradient_norm(parameters).item(), 0.5, rtol=1e-4, atol=0.0)
    clip_by_value(parameters, 0.1)
    torch.nn.utils.clip_grad_value_(expected, 0.1)
    torch.testing.assert_close(full(parameters), [parameter.grad for parameter in expected])


@pytest.mark.parametrize(("num_ranks", "replicate"), [(2, 1), (4, 1), (4, 2)])
def test_clipping_equals_that_of_full_gradients(on_ranks, num_ranks: int, replicate: int) -> None:
    on_ranks(num_ranks, clip, replicate)


def step_with_scaler(poisoned_rank: int | None) -> list[Tensor]:
    parameters, _ = sharded_parameters()
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
