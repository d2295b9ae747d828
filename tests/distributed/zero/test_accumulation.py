"""Parameters that only some backward passes of an accumulation window reach train as in one process."""

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_paral import ParalZeROStrategy
from tests.models.regression import FEATURES, Fitted, Regression, fit
from tests.running import assert_same_fit

PASSES_WITH_A_SECOND_TASK = {"first": (0, 2, 4, 6), "last": (1, 3, 5, 7), "alternating": (1, 2, 5, 6)}
"""Pattern -> the batches with the second task. A window has two batches."""


class TwoTasks(Regression):
    """Has a second task with its own layer in some batches."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.pattern = pattern
        self.second = nn.Linear(FEATURES, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx in PASSES_WITH_A_SECOND_TASK[self.pattern]:
            loss = loss + (self.second(batch[0]) - 1).square().mean()
        return loss


def fit_all(num_ranks: int, make_strategy: Any = lambda: "auto") -> list[Fitted]:
    options = {"accumulate_grad_batches": 2}
    return [
        fit(partial(TwoTasks, pattern), 8, num_ranks, strategy=make_strategy(), **options)
        for pattern in PASSES_WITH_A_SECOND_TASK
    ]


def fit_zero(stage: int, offload: str | None) -> list[Fitted]:
    options = {"stage": stage, "find_unused_parameters": True, "offload_optimizer": offload}
    return fit_all(2, partial(ParalZeROStrategy, **options))


@pytest.mark.parametrize("offload", [None, pytest.param("cpu", marks=pytest.mark.deepspeed_operators("cpu_adam"))])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_gradient_of_a_window_counts_once(on_ranks, stage: int, offload: str | None) -> None:
    for expected, *fits in zip(fit_all(1), *on_ranks(2, fit_zero, stage, offload), strict=True):
        assert_same_fit(fits, expected)
