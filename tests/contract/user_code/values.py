"""Rows about what hooks do with the values of weights: reads, reductions, views, slices, draws."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.contract.user_code.models import FEATURES, Supervised
from tests.contract.user_code.rows import row


def numbers(w: Any) -> Any:
    return [float(w.norm()), w.sum().item(), int(w.argmax()), bool((w > 0).any()), w.tolist()]


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


def zero_row(w: Any) -> None:
    w.data[0].zero_()


def views_of_parts(w: Any) -> None:
    w.data[0].unsqueeze(0).mul_(2.0)
    w.data[:1].T.add_(0.5)
    w.data[0].detach().sub_(0.1)
    y = w.data[:1].t()
    y *= 3


def with_whole(w: Any) -> None:
    noise = torch.linspace(-1, 1, w.numel()).view(w.shape)
    w.data.add_(noise).mul_(noise.abs())
    torch._foreach_lerp_([w.data], [noise], 0.5)
    torch._foreach_copy_([w.data], [w.data + noise])


def masked(w: Any) -> None:
    w.data[w.data < 0] *= 0.5
    w.data.tril_()
    w.data[0] = torch.ones(w.shape[1:])


READS = [numbers, reductions, shapes, choices, comparisons, of_parts, into_plain]
WRITES = [zero_row, views_of_parts, with_whole, masked]
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
