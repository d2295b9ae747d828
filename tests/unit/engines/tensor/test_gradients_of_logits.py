"""Gradients of split logits equal those of whole ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

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
