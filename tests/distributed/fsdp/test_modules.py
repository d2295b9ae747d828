"""Modules that were not written for FSDP train as in one process."""

from functools import cache
from typing import Any

import pytest

from lightning_paral import ParalFSDPStrategy
from tests.models.blocks import GAN, MODULES
from tests.models.tokens import fit
from tests.running import assert_same_fit

NUM_BATCHES = 5


def fit_module(name: str, num_ranks: int, **options: Any) -> Any:
    clipping = {} if MODULES[name] is GAN else {"gradient_clip_val": 0.5}
    return fit(MODULES[name], NUM_BATCHES, num_ranks, **clipping, **options)


@cache
def fit_in_one_process(name: str) -> Any:
    return fit_module(name, 1)


def fit_on_rank(name: str, num_ranks: int) -> Any:
    return fit_module(name, num_ranks, strategy=ParalFSDPStrategy())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", MODULES)
def test_module_trains_as_in_one_process(on_ranks, name: str, num_ranks: int) -> None:
    assert_same_fit(on_ranks(num_ranks, fit_on_rank, name, num_ranks), fit_in_one_process(name))
