"""Code of hooks does the same to sharded tensors as to full ones, whatever operations it uses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_paral import ConfigurationError
from lightning_paral.engines.fsdp.hook_access import HookAccess

ROWS = (5, 1, 4)
"""Numbers of rows, of which two ranks have as many, fewer, or none."""


def clamp(p: Any, q: Any) -> None:
    p.data.clamp_(-0.3, 0.3)


def write_rows_and_columns(p: Any, q: Any) -> None:
    p.data[0].zero_()
    p.data[:, 1] = 7.0
    p.data[-1, :2] += 1.0


def average_into_plain(p: Any, q: Any) -> Any:
    plain = torch.ones(p.shape)
    plain.lerp_(p.detach(), 0.1)
    torch._foreach_lerp_([q.data], [p.data], 0.5)
    return plain


def read(p: Any, q: Any) -> Any:
    return [float(p.norm()), p.mean().item(), p.abs().max().item(), p.data.std(1).tolist(), int((p > 0).sum())]


def limit_norms(p: Any, q: Any) -> None:
    p.div_(p.norm(dim=1, keepdim=True).clamp(min=0.8))


def mask(p: Any, q: Any) -> None:
    p.data *= p.abs() > 0.5
    p.data[p.data < 0] = 0.25


def draw(p: Any, q: Any) -> None:
    torch.manual_seed(3)
    p.add_(torch.randn(p.shape)).add_(torch.randn_like(p))
    nn.init.normal_(q)
    nn.init.trunc_normal_(q.data)


def write_full(p: Any, q: Any) -> None:
    p.copy_(torch.ones(p.shape) * 3)
    p.mul_(p[0].clone())
    q.data = torch.arange(float(q.numel())).view(q.shape)
    q.data.addmm_(torch.ones(len(q), 2), torch.ones(2, 3))


def through_vector(p: Any, q: Any) -> Any:
    vector = nn.utils.parameters_to_vector([p, q])
    nn.utils.vector_to_parameters(vector * 0.9, [p, q])
    return vector


def through_views(p: Any, q: Any) -> Any:
    flat = p.data.view(-1)
    flat[-1] = 1.0
    p.data.mul_(2.0)
    flat[0] -= 5.0
    return [flat[-1].item(), [row.sum().item() for row in p], p.data.T.tolist()]


def write_shard_beside_view(p: Any, q: Any) -> Any:
    """As when gradients are clipped while a hook keeps a view of one."""
    flat = p.data.view(-1)
    flat[0] = 1.0
    (p.to_local() if isinstance(p, DTensor) else p).mul_(2.0)
    return p.detach().clone()


def order(p: Any, q: Any) -> Any:
    return [p.data.sort(0).values, p.cumsum(-2), p.argmax(), p.data.flip(0), torch.equal(p, q)]


def foreach(p: Any, q: Any) -> Any:
    torch._foreach_mul_([p.data, q.data], [q.data, p.data])
    number = torch.tensor(3.0)
    torch._foreach_mul_([p.data, number], torch.tensor(0.5))
    norms = [nn.utils.get_total_norm([p, number]), nn.utils.get_total_norm([p, q])]
    each = torch._foreach_norm([p, q], 2, dtype=torch.float64)
    torch._foreach_addcmul_([p.data, q.data], [q.data, p.data], [p.data, p.data], torch.tensor([0.5, 2.0]))
    return number, norms, each, [each.item() for each in torch._foreach_max([p, q])]


def foreach_of_shards(p: Any, q: Any) -> Any:
    found = [*torch._foreach_add([p, q], [q, p]), *torch._foreach_sub([p, q], 0.5), *torch._foreach_div([p, q], [q, q])]
    assert all(isinstance(each, DTensor) == isinstance(p, DTensor) for each in found), "shards were gathered"
    return found


def penalties(p: Any, q: Any) -> Any:
    with torch.enable_grad():
        found = p.pow(2).sum() + q.abs().mean() + (p * q).sum(1).mean() + p.mean(0).pow(2).sum() + p.norm() * 3.0
        zeros = torch.zeros_like(p)
        found = found + nn.functional.mse_loss(p, zeros) + nn.functional.huber_loss(q, zeros, delta=0.5)
        found = (
            found + nn.functional.smooth_l1_loss(p, q, beta=0.3, reduction="mean") + nn.SoftMarginLoss()(p, zeros + 1)
        )
        found = found + nn.functional.binary_cross_entropy(p.sigmoid(), zeros) + (p * p.detach()[0]).sum() + q.max()
        found = found + p.bfloat16().pow(2).mean() + p[-1].sum() + torch.ops.aten.huber_loss(p, zeros)
        found.backward()
    return found, p.grad, q.grad


def loss_of_a_step(p: Any, q: Any) -> Any:
    """The gradients are averaged over the ranks, whose inputs are 1 and 2."""
    inputs = torch.full((3,), 1.0 + torch.distributed.get_rank() if isinstance(p, DTensor) else 1.5)
    with torch.enable_grad():
        ((p @ inputs).sum() * q.norm() + p.pow(2).sum()).backward()
    return p.grad, q.grad


def refused(p: Any, q: Any) -> None:
    with torch.enable_grad():
        doubled = p * 2
        if isinstance(p, DTensor):
            with pytest.raises(ConfigurationError, match="__setitem__ writes to a sharded tensor"):
                doubled[0] = 0


ACTS = (
    clamp, write_rows_and_columns, average_into_plain, read, limit_norms, mask, draw, write_full, through_vector,
    through_views, write_shard_beside_view, order, foreach, foreach_of_shards, penalties,
    loss_of_a_step, refused,
)  # fmt: skip


def full(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [full(each) for each in value]
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def act(name: str, num_rows: int) -> tuple[Any, Any]:
    function = next(each for each in ACTS if each.__name__ == name)
    p, q = (torch.randn(num_rows, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

    def results(make: Callable[[Tensor], Any]) -> Any:
        parameters = [nn.Parameter(make(each.clone())) for each in (p, q)]
        with torch.no_grad():
            returned = function(*parameters)
        return full([parameters, returned])

    mesh = init_device_mesh("cpu", (2,))
    expected = results(lambda tensor: tensor)
    sharded = [("p", distribute_tensor(p, mesh, [Shard(0)]))]
    access = HookAccess(lambda: sharded)
    try:
        return expected, results(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    finally:
        access.remove()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("name", [each.__name__ for each in ACTS])
def test_hooks_do_the_same_to_shards(on_ranks, name: str, num_rows: int) -> None:
    for expected, found in on_ranks(2, act, name, num_rows):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
