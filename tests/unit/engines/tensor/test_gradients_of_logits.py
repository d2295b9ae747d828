"""Gradients of split logits equal those of whole ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_paral.engines.tensor.logits import SplitLogits
from tests.unit.engines.tensor.logits import SIZES, OnRanks, Same, Square, own, pair, targets

MIXED: dict[str, Callable[[Any, Tensor], Any]] = {
    "loss and a sum": lambda x, target: F.cross_entropy(x, target) + (x.softmax(-1) ** 2).sum() + x[:, 0].sum(),
    "two losses": lambda x, target: F.cross_entropy(x, target) + F.cross_entropy(x / 2, target, label_smoothing=0.1),
    "own function": lambda x, target: Square.apply(x).sum() + F.cross_entropy(x, target),
    "identity": lambda x, target: F.cross_entropy(Same.apply(x), target),
    "checkpoint": lambda x, target: torch.utils.checkpoint.checkpoint(F.cross_entropy, x, target, use_reentrant=False),
}


def compare_mixed() -> None:
    for size in SIZES:
        for name, function in MIXED.items():
            whole, local, logits = pair((5, size))
            expected, found = function(whole, targets(size, (5,))), function(logits, targets(size, (5,)))
            torch.testing.assert_close(found, expected, msg=name)
            expected.backward()
            found.backward()
            torch.testing.assert_close(local.grad, own(whole.grad), msg=name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_add_up(on_ranks: OnRanks, world_size: int) -> None:
    on_ranks(world_size, compare_mixed)


def use_without_gradients() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        whole, _, _ = pair((4, 7))
        with mode():
            logits = SplitLogits.of(own(whole), 7, dist.group.WORLD)
            assert not logits.requires_grad
            assert logits.is_leaf
            target = targets(7, (4,))
            torch.testing.assert_close(F.cross_entropy(logits, target), F.cross_entropy(whole, target))
            assert torch.equal(logits.argmax(-1), whole.argmax(-1))
            assert torch.equal(logits.flatten(0, 0).softmax(-1), whole.softmax(-1))
        assert not logits.exp().requires_grad
    detached = pair((4, 7))[2].detach()
    assert not detached.requires_grad
    assert not F.cross_entropy(detached, targets(7, (4,))).requires_grad


def test_without_gradients(on_ranks: OnRanks) -> None:
    on_ranks(2, use_without_gradients)
