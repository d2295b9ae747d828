"""Split logits cannot be changed in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lightning_paral.errors import ConfigurationError
from tests.unit.engines.tensor.logits import OnRanks, pair, targets


def assigned(x: Any) -> None:
    x[..., 0] = 1.0


def written_later(x: Any) -> None:
    x[:, 3].zero_()
    x.argmax(-1)


WRITES: list[Callable[[Any], Any]] = [
    lambda x: x.div_(2),
    lambda x: torch.relu_(x),
    lambda x: torch.exp(torch.ones(4, 7), out=x),
    lambda x: setattr(x, "data", torch.zeros(4, 7)),
    assigned,
]
TO_COPIES: list[Callable[[Any], Any]] = [lambda x: F.relu(x, inplace=True), written_later]


def write_in_all_ways() -> None:
    for context, more in ((torch.enable_grad, []), (torch.no_grad, TO_COPIES), (torch.inference_mode, TO_COPIES)):
        for function in (*WRITES, *more):
            with context(), pytest.raises(ConfigurationError, match="cannot be changed in place"):
                function(pair((4, 7))[2] * 1)
    logits = pair((4, 7))[2] * 1
    with pytest.raises(ConfigurationError, match=r"logits = logits.masked_fill\("):
        logits.masked_fill_(torch.ones(4, 7) > 0, 0.0)
    with pytest.raises(ConfigurationError, match="can become a leaf"):
        logits.detach().requires_grad_()
    with torch.no_grad():
        (logits + 0).zero_()  # a copy
    F.cross_entropy(logits, targets(7, (4,)))


def test_writes_raise_an_error(on_ranks: OnRanks) -> None:
    on_ranks(2, write_in_all_ways)
