"""Every strategy resumes from the checkpoints of every strategy, at any world size, as if training had not stopped."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_paral.diagnostics.check_compare import CheckRow, Checks
from lightning_paral.diagnostics.check_run import Fit
from tests.contract.case import StrategyCase
from tests.contract.cases import BY_LABEL, CASES
from tests.contract.checking import checks_of, strategy_of
from tests.models.resumable import GLOBAL_BATCH_SIZE, NUM_BATCHES, SAVED_AFTER, Resumable, batch


class Divided(Resumable):
    """Takes its batches from a loader. Its buffer counts steps, and has no statistics of a rank's own samples."""

    def __init__(self) -> None:
        super().__init__()
        del self.norm
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.tied(torch.tanh(self.second(self.frozen(torch.tanh(self.first(x))))))) * self.scale

    def training_step(self, samples: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        inputs, targets = samples
        return nn.functional.mse_loss(self(inputs), targets)


def project(inside_epoch: bool) -> Fit:
    """Return a fit of 5 steps, which is interrupted after 4 batches, inside an epoch or at its end."""
    batches = map(batch, range(NUM_BATCHES if inside_epoch else SAVED_AFTER))
    dataset = TensorDataset(*map(torch.cat, zip(*batches, strict=True)))
    loader = DataLoader(dataset, GLOBAL_BATCH_SIZE, shuffle=inside_epoch)
    return Fit(module=Divided(), data=loader, trainer={"accumulate_grad_batches": 2})


def requirement(case: StrategyCase) -> str:
    return "operators" if case.needs_operators else "deepspeed" if case.needs_deepspeed else "torch"


CASES_TO_RESUME = [case for case in CASES if case.resumes_others and case.sizes_among(1, 2, 4)]
GROUPS = ("torch", "deepspeed", "operators")
SOURCES = {group: [case for case in CASES_TO_RESUME if requirement(case) == group] for group in GROUPS}
"""The cases that save, by what they need. A test resumes from the checkpoints of all of a group."""


@pytest.fixture(scope="module")
def checks(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Checks]:
    # ZeRO cannot train in fp64, so nothing does that has to resume from its checkpoints.
    return checks_of(project, rank_pool, tmp_path_factory, NUM_BATCHES // 2, precisions=(False,))


@pytest.fixture(scope="module")
def saved(checks: Callable[[bool], Checks]) -> Callable[[str, bool], CheckRow]:
    """A function that trains and saves, on 2 ranks if the case runs with 2."""

    @cache
    def saved_under(label: str, inside_epoch: bool) -> CheckRow:
        return checks(inside_epoch).row(label, strategy_of(label), BY_LABEL[label].sizes_among(2, 4, 1)[0])

    return saved_under


def operators_of(*cases: StrategyCase) -> list[pytest.MarkDecorator]:
    return [pytest.mark.deepspeed_operators] if any(case.needs_operators for case in cases) else []


def parameters() -> list[Any]:
    """Return each group of sources with each target at each of its sizes."""
    return [
        pytest.param(group, target.label, size, marks=operators_of(target, *sources))
        for target in CASES_TO_RESUME
        for group, sources in SOURCES.items()
        for size in target.sizes_among(1, 2, 4)
    ]


@pytest.mark.lane("default")
@pytest.mark.parametrize(("sources", "target", "size"), parameters())
def test_resuming_continues_as_the_uninterrupted_run(checks, saved, sources: str, target: str, size: int) -> None:
    for source in SOURCES[sources]:
        # `paral_dp` neither saves nor restores the position in the data, as Lightning in one process.
        inside_epoch = source.has_ranks and BY_LABEL[target].has_ranks
        row = saved(source.label, inside_epoch)
        assert row.outcome == "equal", row
        found = checks(inside_epoch).resumed(row, target, strategy_of(target), size)
        assert found.outcome == "equal", found
