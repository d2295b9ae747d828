"""Averaging functions that are not elementwise are found by a trial, which does not change their state."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_avg_fn, get_swa_multi_avg_fn

from lightning_paral.averaging.elementwise import check_elementwise
from lightning_paral.errors import ConfigurationError


class Warmed:
    """A decay that grows with the number of calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[int] = []

    def __call__(self, average: Tensor, current: Tensor, count: Any) -> Tensor:
        self.calls += 1
        self.seen.append(int(count))
        return average.lerp(current, 1 / self.calls)


@pytest.mark.parametrize("function", [get_ema_avg_fn(0.9), get_swa_avg_fn(), Warmed()])
def test_functions_of_single_elements_pass(function: Any) -> None:
    check_elementwise("avg_fn", function, multi=False)
    assert not isinstance(function, Warmed) or (function.calls, function.seen) == (0, [])


@pytest.mark.parametrize("function", [get_ema_multi_avg_fn(0.9), get_swa_multi_avg_fn()])
def test_functions_of_lists_pass(function: Any) -> None:
    check_elementwise("multi_avg_fn", function, multi=True)


def by_norm(average: Tensor, current: Tensor, count: Any) -> Tensor:
    return average + (current - average) / (1 + current.norm())


def by_row(average: Tensor, current: Tensor, count: Any) -> Tensor:
    return average.lerp(current, 0.5) if average.dim() > 1 else current


def noisy(average: Tensor, current: Tensor, count: Any) -> Tensor:
    return average + torch.rand_like(current)


def jointly(averages: list[Tensor], current: list[Tensor], count: Any) -> None:
    scale = sum(float(value.abs().sum()) for value in current)
    for average, value in zip(averages, current, strict=True):
        average.add_(value / scale)


@pytest.mark.parametrize(("function", "multi"), [(by_norm, False), (by_row, False), (noisy, False), (jointly, True)])
def test_functions_that_are_not_elementwise_are_refused(function: Any, multi: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"avg_fn of Mine is not elementwise.*use paral_ddp"):
        check_elementwise("avg_fn of Mine", function, multi=multi)
