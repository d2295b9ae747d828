"""FSDP's options go together: every combination of them trains as one process does."""

from itertools import product
from typing import Any

import pytest

from lightning_paral import ActivationCheckpointing, ParalFSDPStrategy
from tests.models.regression import fit_regression
from tests.running import assert_same_fit

NUM_STEPS = 8
UNITS: dict[str, dict[str, Any]] = {"auto": {}, "class": {"units": ["Linear"]}, "min_params": {"min_params": 100}}
COMBINATIONS = [
    {"accumulate": accumulate, "replicate": replicate, "offload": offload, "activation_checkpointing": checkpointing}
    for accumulate, replicate, offload, checkpointing in product(
        ("sharded", "unsharded"), (1, 2), (False, True), (None, ActivationCheckpointing(units=["Linear"]))
    )
]


def fit_all(units: str) -> list[Any]:
    return [
        fit_regression(NUM_STEPS, 3, 4, strategy=ParalFSDPStrategy(**UNITS[units], **options))
        for options in COMBINATIONS
    ]


@pytest.mark.parametrize("units", UNITS)
def test_every_combination_of_options_equals_one_process(on_ranks, units: str) -> None:
    expected = fit_regression(NUM_STEPS, 3, 1)
    ranks = on_ranks(4, fit_all, units, timeout=300)
    for number, options in enumerate(COMBINATIONS):
        print(options)  # shown where the assertion fails
        assert_same_fit([fits[number] for fits in ranks], expected)
