"""Training with FSDP equals one process for every combination of its options."""

from itertools import product
from typing import Any

import pytest

from lightning_paral import ActivationCheckpointing, ParalFSDPStrategy
from tests.models.regression import fit_regression
from tests.running import assert_same_fit

NUM_STEPS = 4
UNITS: dict[str, dict[str, Any]] = {"auto": {}, "class": {"units": ["Linear"]}}
VALUES: dict[str, tuple[Any, Any]] = {
    "accumulate": ("sharded", "unsharded"),
    "replicate": (1, 2),
    "offload": (False, True),
    "activation_checkpointing": (None, ActivationCheckpointing(units=["Linear"])),
}
ALL = list(product((0, 1), repeat=len(VALUES)))
PAIRS = [(0, 0, 0, 0), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)]
"""Combinations in which every two options take all four pairs of their values."""
CHOICES = {"auto": PAIRS, "class": ALL}
"""Options combine in the same way for any units, so only one choice of units runs all combinations."""


def combinations(units: str) -> list[dict[str, Any]]:
    return [
        {name: values[index] for (name, values), index in zip(VALUES.items(), choice, strict=True)}
        for choice in CHOICES[units]
    ]


def fit_all(units: str) -> list[Any]:
    return [
        fit_regression(NUM_STEPS, 3, 4, strategy=ParalFSDPStrategy(**UNITS[units], **options))
        for options in combinations(units)
    ]


@pytest.mark.parametrize("units", UNITS)
def test_every_combination_of_options_equals_one_process(on_ranks, units: str) -> None:
    expected = fit_regression(NUM_STEPS, 3, 1)
    ranks = on_ranks(4, fit_all, units, timeout=300)
    for number, options in enumerate(combinations(units)):
        print(options)  # shown if the assertion fails
        assert_same_fit([fits[number] for fits in ranks], expected)
