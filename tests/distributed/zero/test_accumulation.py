"""Parameters that only some backward passes of an accumulation window reach train as in one process."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ParalZeROStrategy
from tests.models.regression import FEATURES, Regression
from tests.models.regression import fit as fit_module

PASSES_WITH_A_SECOND_TASK = {"first": (0, 2, 4, 6), "last": (1, 3, 5, 7), "alternating": (1, 2, 5, 6)}
"""Pattern -> the batches with the second task. A window has two batches."""


class TwoTasks(Regression):
    """Has a second task with its own layer in some batches."""

    def __init__(self, pattern: str, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.pattern = pattern
        self.second = nn.Linear(FEATURES, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx in PASSES_WITH_A_SECOND_TASK[self.pattern]:
            loss = loss + (self.second(batch[0]) - 1).square().mean()
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return None


def fit(num_ranks: int, pattern: str, by_hand: bool, strategy: Any = "auto", **options: Any) -> dict[str, Tensor]:
    windows = {} if by_hand else {"accumulate_grad_batches": 2}
    return fit_module(partial(TwoTasks, pattern, by_hand), 8, num_ranks, strategy=strategy, **windows, **options)[1]


def fit_zero(stage: int, offload: str | None, by_hand: bool) -> dict[str, dict[str, Tensor]]:
    found = {}
    for pattern in PASSES_WITH_A_SECOND_TASK:
        strategy = ParalZeROStrategy(stage=stage, find_unused_parameters=True, offload_optimizer=offload)
        found[pattern] = fit(2, pattern, by_hand, strategy)
    return found


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("offload", [None, pytest.param("cpu", marks=pytest.mark.deepspeed_operators("cpu_adam"))])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_gradient_of_a_window_counts_once(on_ranks, stage: int, offload: str | None, by_hand: bool) -> None:
    expected = {pattern: fit(1, pattern, by_hand) for pattern in PASSES_WITH_A_SECOND_TASK}
    for found in on_ranks(2, fit_zero, stage, offload, by_hand):
        for pattern, weights in expected.items():
            for name, weight in weights.items():
                torch.testing.assert_close(found[pattern][name], weight, msg=f"{pattern}: {name}")


def fit_in_low_precision(offload: str | None) -> list[dict[str, Tensor]]:
    found = []
    for pattern in PASSES_WITH_A_SECOND_TASK:
        strategy = ParalZeROStrategy(stage=2, find_unused_parameters=True, offload_optimizer=offload)
        found.append(fit(2, pattern, by_hand=False, strategy=strategy, precision="bf16-true"))
    return found


@pytest.mark.deepspeed_operators("cpu_adam")
def test_offload_does_not_change_results_in_low_precision(on_ranks) -> None:
    [expected, _] = on_ranks(2, fit_in_low_precision, None)
    for found in on_ranks(2, fit_in_low_precision, "cpu"):
        for ours, theirs in zip(found, expected, strict=True):
            for name, weight in theirs.items():
                torch.testing.assert_close(ours[name], weight, rtol=2e-2, atol=2e-3)
