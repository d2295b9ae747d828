"""Fits after a failed one, and memory and traffic under ZeRO as in the paper."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.zero_memory import bytes_by_formula, bytes_held
from tests.benchmarks.zero_traffic import model_sizes_by_formula, model_sizes_sent_per_step
from tests.models.regression import Regression, fit_regression, regression_data
from tests.running import assert_same_fit, quiet_trainer

STAGES = ("paral_zero1", "paral_zero2", "paral_zero3")

# Failures


class Failing(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)


def nvme_folder() -> Path:
    folder = Path(tempfile.gettempdir(), "lightning_paral_tests_nvme_empty")
    folder.mkdir(exist_ok=True)
    return folder


def fit_after_failure(strategy: str) -> Any:
    if strategy == "paral_zero3_nvme":
        os.environ["PARAL_NVME_PATH"] = str(nvme_folder())
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(max_epochs=1, devices=2, strategy=strategy).fit(Failing(), regression_data(5, 2))
    # Lightning sets the number of threads if it is not set yet.
    assert os.environ.keys() - before.keys() <= {"OMP_NUM_THREADS"}
    dist.barrier()
    return fit_regression(8, 1, 2, strategy=strategy)


@pytest.mark.parametrize("strategy", [*STAGES, "paral_zero3_nvme"])
def test_fit_after_a_failed_one(on_ranks, strategy: str) -> None:
    tolerance = 1e-4 if "nvme" in strategy else 1e-5
    assert_same_fit(on_ranks(2, fit_after_failure, strategy), fit_regression(8, 1, 1), tolerance)
    if strategy == "paral_zero3_nvme":
        assert list(nvme_folder().iterdir()) == []


# Memory and traffic, counted


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_traffic_per_step_equals_the_paper(on_ranks, stage: int, world_size: int) -> None:
    ranks = on_ranks(world_size, model_sizes_sent_per_step, stage)
    assert sum(ranks) / world_size == pytest.approx(model_sizes_by_formula(stage, world_size), rel=0.05)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_equals_the_paper(on_ranks, stage: int, world_size: int) -> None:
    for held in on_ranks(world_size, bytes_held, stage):
        for part, expected in bytes_by_formula(stage, world_size).items():
            assert held[part] == pytest.approx(expected, rel=0.05), part
