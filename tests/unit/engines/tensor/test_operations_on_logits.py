"""Operations on split logits equal those on whole ones, and gather them no more than needed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torchmetrics.functional import accuracy

from lightning_paral.engines.tensor.split_tensor import SplitTensor
from lightning_paral.errors import ConfigurationError
from tests.unit.engines.tensor.logits import SIZES, OnRanks, counted, own, pair

SPLIT: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda x: x.flatten(0, 1),
    "view": lambda x: x.view(-1, x.size(-1)),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float64),
    "contiguous": lambda x: x[:, :-1].contiguous(),
    "all but the last": lambda x: x[:, :-1, :],
    "one position": lambda x: x[:, -1],
    "new dimension": lambda x: x[:, None],
    "permute": lambda x: x.permute(1, 0, 2),
    "scale": lambda x: 2 * x / 0.7 * 3,
    "concatenated": lambda x: torch.cat([x, x]),
    "masked": lambda x: x.masked_fill(torch.ones_like(x) > 2, 0.0),
    "last transposed": lambda x: x.transpose(-1, 0) + 0,
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
}
GATHERED: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "mask": lambda x: x[torch.tensor([[True, False, True], [False, True, True]])],
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "softmax": lambda x: x.softmax(-1),
    "topk": lambda x: torch.topk(x, 2).values,
    "mean": lambda x: x.mean(),
    "sum of products": lambda x: (x * x).sum(-1),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), torch.full_like(x, 0.5), reduction="sum"),
    "nll_loss": lambda x: F.nll_loss(F.log_softmax(x.view(-1, x.shape[-1]), -1), torch.zeros(6, dtype=torch.long)),
    "class": lambda x: x[..., 1],
    "some classes": lambda x: x[..., :-1],
    "as a number": lambda x: x[0, 0, 0] * float(x[0, 0, 1].detach()),
    "in numpy": lambda x: torch.from_numpy(x.detach().numpy()).clone(),
    "max": lambda x: x.max(dim=-1)[0],
    "einsum": lambda x: torch.einsum("btv,btv->bt", x, x),
    "accuracy": lambda x: accuracy(
        x.detach().view(-1, x.shape[-1]), torch.zeros(6, dtype=torch.long), task="multiclass", num_classes=x.shape[-1]
    ),
}


def compare_operations(names: list[str], size: int) -> None:
    for name in names:
        whole, local, logits = pair((2, 3, size))
        operation = (SPLIT | GATHERED)[name]
        expected = operation(whole)
        with counted() as calls:
            found = operation(logits)
            str(logits), f"{logits}", logits.requires_grad, logits.is_cuda, len(logits), hash(logits), dir(logits)
            assert name in GATHERED or calls == [], name
        assert type(found) is (SplitTensor if name in SPLIT else Tensor), name
        assert (found.shape, found.dtype, found.requires_grad) == (
            expected.shape,
            expected.dtype,
            expected.requires_grad,
        )
        full = found.full() if isinstance(found, SplitTensor) else found
        assert torch.equal(full, expected), name
        if expected.requires_grad:
            scale = torch.arange(expected.numel(), dtype=expected.dtype).reshape(expected.shape)
            (expected * scale).sum().backward()
            (found * scale).sum().backward()
            torch.testing.assert_close(local.grad, own(whole.grad), msg=name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_operations_equal_those_on_whole_logits(on_ranks: OnRanks, world_size: int, size: int) -> None:
    on_ranks(world_size, compare_operations, [*SPLIT, *GATHERED], size)


def gathers() -> list[list[str]]:
    found = []
    _, _, logits = pair((3, 7))
    with counted() as calls:
        logits.softmax(-1), logits.argmax(-1)
        with torch.no_grad():
            logits.topk(2)
    found.append(calls)
    _, local, logits = pair((3, 7))
    with counted() as calls:
        with torch.no_grad():
            assert not logits.softmax(-1).requires_grad
        logits.exp().sum().backward()
    found.append(calls)
    torch.testing.assert_close(local.grad, local.detach().exp())
    return found


def test_gathers_once_and_again_if_only_the_first_has_no_graph(on_ranks: OnRanks) -> None:
    assert on_ranks(2, gathers) == [[["gather 24"], ["gather 24"] * 2]] * 2


def write_in_place() -> None:
    logits = pair((4, 7))[2] * 1
    with torch.no_grad(), pytest.raises(ConfigurationError, match="cannot be changed in place"):
        logits[..., 0] = 1.0
    with pytest.raises(ConfigurationError, match="have no gradient for retain_grad"):
        logits.retain_grad()
    with pytest.raises(ConfigurationError, match="have no gradient for grad"):
        torch.autograd.grad(logits.sum(), logits)


def test_writes_and_gradients_are_refused(on_ranks: OnRanks) -> None:
    on_ranks(2, write_in_place)
