"""Hooks read sharded parameters and write to slices of them as in one process."""

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import huber_loss, mse_loss

from tests.models.regression import FEATURES, Regression, regression_data
from tests.running import quiet_trainer

Act = Callable[[Any], Any]


def numbers(w: Any) -> Any:
    return [float(w.norm()), w.sum().item(), int(w.argmax()), bool((w > 0).any()), f"{w.mean():.4f}", w.tolist()]


def arrays(w: Any) -> Any:
    return [w.numpy().sum(), numpy.array(w.data).mean(), numpy.asarray(w.data)[0].tolist()]


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
    for number, row in enumerate(w.data):
        row.mul_(number + 0.5)
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


class Acting(Regression):
    def __init__(self, act: Act) -> None:
        super().__init__()
        self.narrow = nn.Linear(FEATURES, 1)  # fewer rows than ranks
        self.odd = nn.Linear(FEATURES, 7)
        self.act, self.seen = act, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + (self.narrow(batch[0]) + self.odd(batch[0])).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    self.seen.append(self.act(parameter))


def run(name: str, strategy: Any, num_ranks: int) -> tuple[list[Any], dict[str, Tensor]]:
    acts = {act.__name__: act for act in (*READS, *WRITES)}
    torch.manual_seed(2)
    module = Acting(acts[name])
    quiet_trainer(max_steps=2, devices=num_ranks, strategy=strategy).fit(module, regression_data(2, num_ranks))
    plain = [copy.deepcopy(getattr(v, "full_tensor", lambda v=v: v)()) for seen in module.seen for v in seen or ()]
    return plain, {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("act", [*READS, *WRITES], ids=lambda act: act.__name__)
def test_hooks_act_as_in_one_process(on_ranks, act: Act) -> None:
    seen, weights = run(act.__name__, "auto", 1)
    for ours, own_weights in on_ranks(2, run, act.__name__, "paral_fsdp", 2):
        torch.testing.assert_close(own_weights, weights)
        assert len(ours) == len(seen)
        for mine, theirs in zip(ours, seen, strict=True):
            if isinstance(theirs, str):
                assert float(mine) == pytest.approx(float(theirs), abs=2e-4)
            else:
                torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(theirs), check_dtype=False)


def written_array(strategy: str) -> str:
    def act(w: Any) -> None:
        array = w.data.numpy()
        array *= 2

    try:
        quiet_trainer(max_steps=1, devices=2, strategy=strategy).fit(Acting(act), regression_data(2, 2))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_arrays_of_sharded_tensors_are_read_only(on_ranks) -> None:
    assert all("read-only" in said for said in on_ranks(2, written_array, "paral_fsdp"))
