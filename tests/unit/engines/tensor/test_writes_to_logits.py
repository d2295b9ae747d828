"""Split logits cannot be changed in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from lightning_paral.errors import ConfigurationError
from tests.unit.engines.tensor.logits import OnRanks, pair, targets


def write(function: Callable[[Any], Any], logits: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be changed in place"):
        function(logits)


def augmented_division(x: Any) -> None:
    x /= 2


def augmented_sum(x: Any) -> None:
    x += 1


def assigned(x: Any) -> None:
    x[..., 0] = 1.0


def write_in_all_ways() -> None:
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            _, _, logits = pair((4, 7))
            logits = logits * 1
            for function in (
                lambda x: x.div_(2),
                lambda x: x.masked_fill_(torch.ones(4, 7) > 0, 0.0),
                lambda x: torch.relu_(x),
                lambda x: torch.exp(torch.ones(4, 7), out=x),
                lambda x: setattr(x, "data", torch.zeros(4, 7)),
                augmented_division,
                augmented_sum,
                assigned,
            ):
                write(function, logits)
    with pytest.raises(ConfigurationError, match=r"logits = logits.masked_fill\("):
        logits.masked_fill_(torch.ones(4, 7) > 0, 0.0)
    with pytest.raises(ConfigurationError, match="can become a leaf"):
        logits.detach().requires_grad_()
    with pytest.raises(ConfigurationError, match="can become a leaf"):
        logits.detach().requires_grad = True
    assert logits.detach().requires_grad_(False).requires_grad is False


def write_to_copies() -> None:
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            logits = pair((4, 7))[2]
            write(lambda x: F.relu(x, inplace=True), logits)
            logits = pair((4, 7))[2]
            view = logits.view(2, 2, 7)
            column = logits[:, 3]
            column.zero_()
            write(lambda x: F.cross_entropy(x, targets(7, (4,))), logits)
            write(lambda x: x.argmax(-1), view)
            logits = pair((4, 7))[2]
            copied = logits + 0
            copied.zero_()
            logits.argmax(-1)
    plain = torch.zeros(4, 7)
    _, _, logits = pair((4, 7))
    plain.copy_(logits.detach())
    plain[0] = logits.detach()[0]
    assert torch.equal(plain, logits.detach() + 0)


def test_writes_raise_an_error(on_ranks: OnRanks) -> None:
    on_ranks(2, write_in_all_ways)


def test_writes_to_gathered_copies_raise_an_error(on_ranks: OnRanks) -> None:
    on_ranks(2, write_to_copies)
