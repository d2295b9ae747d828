"""Rows about what hooks do with the values of weights: reads, reductions, views, slices, draws."""

from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import huber_loss, mse_loss

from tests.contract.user_code.models import FEATURES, Supervised
from tests.contract.user_code.rows import row


def numbers(w: Any) -> Any:
    return [float(w.norm()), w.sum().item(), int(w.argmax()), bool((w > 0).any()), w.tolist()]


def arrays(w: Any) -> Any:
    return [float(w.numpy().sum()), float(numpy.array(w.data).mean()), numpy.asarray(w.data)[0].tolist()]


def reductions(w: Any) -> Any:
    return [
        w.max(),
        w.min(),
        w.abs().max(),
        w.norm(float("inf")),
        w.amax(),
        w.norm(),
        w.std(),
        w.median(),
        w.sum(0).fill_(2),
    ]


def places(w: Any) -> Any:
    return [w.argmax(), w.argmin(0), *w.max(0), *w.min(0), mse_loss(w, w * 2), huber_loss(w, w * 2)]


MEANS = [
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.soft_margin_loss,
]


def means(w: Any) -> Any:
    return [loss(w.sigmoid(), (w * 2).sigmoid()) for loss in MEANS]


@torch.enable_grad()
def gradients_of_means(w: Any) -> Any:
    losses = [loss(w.sigmoid(), (w.detach() * 2).sigmoid()) for loss in MEANS]
    return [torch.autograd.grad(loss, w)[0] for loss in losses]


def cumulative(w: Any) -> Any:
    return [w.cumsum(-2), w.cumprod(-2), w.exp().logcumsumexp(-2), w.flatten().cumsum(-1), w.cumsum(dim=-1)]


def out_of_range(w: Any) -> Any:
    errors = []
    for dim in (w.dim(), -w.dim() - 1):
        try:
            w.cumsum(dim)
        except (IndexError, RuntimeError):  # as DTensor wraps it
            errors.append(dim)
    return errors


def newer_operations(w: Any) -> Any:
    return [
        w.isfinite().all(),
        (w != w.clone()).any(),
        w.flip(0).sum(),
        w.cumprod(0).sum(),
        (w.T @ w).det(),
        w.nansum(),
    ]


def shapes(w: Any) -> Any:
    return [w.view(-1).sum(), w.flatten().norm(), w.squeeze().sum(), torch.cat([w.flatten(), w.flatten()]).sum()]


def choices(w: Any) -> Any:
    return [w[w > 0].sum(), torch.masked_select(w, w > 0).sum(), w[[0]].sum(), w[torch.tensor([-1])].sum()]


def comparisons(w: Any) -> Any:
    return [torch.equal(w, w.clone()), torch.allclose(w, w * 1), bool((w == w).all()), bool(w.isnan().any())]


def of_parts(w: Any) -> Any:
    x = w.data[0]
    w.data.add_(1.0)
    return [x.sum(), *(float(row.sum()) for row in w.data)]


def into_plain(w: Any) -> Any:
    total, average, same = torch.zeros(()), torch.zeros(w.shape), torch.ones(w.shape)
    total += w.data.sum()
    average.copy_(w.data)
    same.lerp_(w.data, 0.3)
    return [total, average, same, same * w.data, w.data - average]


READS = [
    numbers, arrays, reductions, places, means, gradients_of_means, cumulative, out_of_range, newer_operations, shapes,
    choices, comparisons, of_parts, into_plain,
]  # fmt: skip


def zero_row(w: Any) -> None:
    w.data[0].zero_()


def by_functions(w: Any) -> None:
    torch.relu_(w.data[0])
    torch.add(w.data[-1], 1.0, out=w.data[-1])
    nn.functional.relu(w.data[0], inplace=True)


def views_of_parts(w: Any) -> None:
    w.data[0].unsqueeze(0).mul_(2.0)
    w.data[:1].T.add_(0.5)
    w.data[0].detach().sub_(0.1)
    y = w.data[:1].t()
    y *= 3


def in_turns(w: Any) -> None:
    for number, part in enumerate(w.data):
        part.mul_(number + 0.5)
    torch._foreach_mul_(list(w.data), 0.9)


def stale(w: Any) -> None:
    x = w.data.view(-1)
    w.data.add_(1.0)
    x[0] = 0.0
    y, z = w.data[0], w.data[:1]
    y.zero_()
    z.add_(0.25)


def with_whole(w: Any) -> None:
    noise = torch.linspace(-1, 1, w.numel()).view(w.shape)
    w.data.add_(noise).mul_(noise.abs())
    torch._foreach_lerp_([w.data], [noise], 0.5)
    torch._foreach_copy_([w.data], [w.data + noise])


def masked(w: Any) -> None:
    w.data[w.data < 0] *= 0.5
    w.data.tril_()
    w.data[0] = torch.ones(w.shape[1:])


def drawn_in_columns(w: Any) -> None:
    torch.manual_seed(3)
    w.data.t().normal_()
    w.data.add_(torch.rand_like(w.t()).t())


WRITES = [drawn_in_columns, zero_row, by_functions, views_of_parts, in_turns, stale, with_whole, masked]


SHARDED = ("paral_fsdp", "paral_tp")


class Acting(Supervised):
    """Calls functions with each matrix, some with fewer rows than ranks, and keeps what they return."""

    acts: Any = ()

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(FEATURES, 1)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + (self.narrow(batch[0]) - batch[1][:, :1]).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    self.seen += [act(parameter) for act in self.acts]


@row("weights read in many ways", only=SHARDED)
class Reading(Acting):
    """Reductions, losses, cumulative sums, views, indices, comparisons, rows and arrays of weights, in a hook."""

    acts = READS


@row("weights written in many ways", only=SHARDED)
class Writing(Acting):
    """Writes to rows, slices, transposes and views of weights, from whole tensors, masks and draws, in a hook."""

    acts = WRITES
