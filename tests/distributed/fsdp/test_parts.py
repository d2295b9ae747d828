"""Components of the FSDP engine: the gradient scaler, averaged gradients, norms, and recovery after a failure."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_paral.comm.broadcast import broadcast
from lightning_paral.distributed.failures import reachable as reaching
from lightning_paral.distributed.failures.survivors import StepPosition
from lightning_paral.distributed.mesh import ParallelDims, make_mesh
from lightning_paral.engines.fsdp.gather import gather_after_failure
from lightning_paral.engines.fsdp.precision import ShardedScaler
from lightning_paral.engines.fsdp.replicated_tensors import AveragedGradients
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


def average_and_broadcast() -> list[Tensor]:
    rank = dist.get_rank()
    scalars = [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(2.0)).requires_grad_(False)]
    averaged = AveragedGradients(scalars, 2)
    for _ in range(2):  # accumulates
        (scalars[0] * (rank + 1)).backward()
    scalars[1].requires_grad_(True)
    (scalars[0] * 0 + scalars[1] * rank).backward()
    averaged.remove()
    tensors = [torch.full((3,), rank), torch.full((2, 2), float(rank)), torch.full((600_000,), rank + 0.5)[::2]]
    broadcast(tensors)
    return [scalars[0].grad, scalars[1].grad, *tensors]


def test_gradients_are_averaged_and_tensors_are_rank_zeros(on_ranks) -> None:
    for first, second, *tensors in on_ranks(2, average_and_broadcast):
        assert first == 3.0
        assert second == 0.5
        assert [tensor.unique().tolist() for tensor in tensors] == [[0], [0.0], [0.5]]


def gather_alone() -> bool:
    patience, reaching.PATIENCE = reaching.PATIENCE, timedelta(seconds=0.5)
    try:
        if dist.get_rank():
            dist.barrier()  # rank 1 is too late, and gets an error
        reachable = reaching.wait_for_ranks("a run", StepPosition(), [0, 1], timedelta(seconds=30))
        if not dist.get_rank():
            dist.barrier()
    finally:
        reaching.PATIENCE = patience
    return gather_after_failure(reachable) == "the run failed on some of its ranks only"


def test_rank_that_failed_alone_does_not_wait_forever(on_ranks) -> None:
    assert on_ranks(2, gather_alone) == [True, True]


def gather_together() -> Tensor:
    mesh = make_mesh(CPU, dims_of(2))
    reachable = reaching.wait_for_ranks(
        f"another run of {dist.get_world_size()}", StepPosition(), [0, 1, 0, 1], timedelta(seconds=30)
    )
    gather = gather_after_failure(reachable)
    assert not isinstance(gather, str)
    return gather(distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Replicate(), Shard(0)]))


def test_ranks_that_all_failed_gather_over_a_new_group(on_ranks) -> None:
    for gathered in on_ranks(4, gather_together):
        assert torch.equal(gathered, torch.arange(15.0).view(5, 3))
