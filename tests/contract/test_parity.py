"""Training under every strategy and at any world size equals one process with the same global batches."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_paral.diagnostics.check_compare import Checks
from lightning_paral.diagnostics.check_run import Fit
from tests.contract.cases import BY_LABEL, CASES
from tests.contract.checking import checks_of, strategy_of
from tests.models.regression import GLOBAL_BATCH_SIZE, Regression, samples

NUM_STEPS = 8


def project(accumulate: int) -> Fit:
    """Return a fit of `NUM_STEPS` steps, in which the last accumulation window lacks a batch."""
    data = DataLoader(samples(NUM_STEPS * accumulate - (accumulate > 1)), GLOBAL_BATCH_SIZE, shuffle=True)
    trainer: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.1}
    return Fit(module=Regression(), data=data, trainer=trainer)


@pytest.fixture(scope="module")
def checks(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Checks]:
    return checks_of(project, rank_pool, tmp_path_factory, NUM_STEPS)


@pytest.mark.lane("default")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("label", "size"), [(case.label, size) for case in CASES for size in case.sizes if GLOBAL_BATCH_SIZE % size == 0]
)
def test_training_equals_one_process(checks, label: str, accumulate: int, size: int) -> None:
    row = checks(accumulate).row(label, strategy_of(label), size, saves=False)

    assert row.outcome == "equal", row
    assert row.precision == ("32-true" if BY_LABEL[label].needs_deepspeed else "64-true")
