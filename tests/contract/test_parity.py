"""Training under every strategy and at any world size equals one process with the same global batches."""

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.contract.cases import BY_LABEL, CASES
from tests.models.regression import GLOBAL_BATCH_SIZE, fit_regression

NUM_STEPS = 20


@cache
def fit_in_one_process(accumulate: int) -> tuple[list[float], dict[str, Tensor]]:
    return fit_regression(NUM_STEPS, accumulate, num_ranks=1)


def fit_by_case(label: str, accumulate: int, num_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    return fit_regression(NUM_STEPS, accumulate, num_ranks, strategy=BY_LABEL[label].strategy())


def assert_equals_one_process(
    ranks: list[tuple[list[float], dict[str, Tensor]]], accumulate: int, tolerance: float
) -> None:
    expected_losses, expected_weights = fit_in_one_process(accumulate)
    losses = torch.tensor([rank_losses for rank_losses, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected_losses), rtol=tolerance, atol=0.0)
    for _, weights in ranks:
        assert weights.keys() == expected_weights.keys()
        for name, weight in weights.items():
            assert (weight - expected_weights[name]).abs().max() <= tolerance, name


@pytest.mark.lane("default")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("label", "world_size"),
    [(case.label, size) for case in CASES for size in case.world_sizes if GLOBAL_BATCH_SIZE % size == 0],
)
def test_training_equals_one_process(on_ranks, label: str, accumulate: int, world_size: int) -> None:
    ranks = on_ranks(world_size, fit_by_case, label, accumulate, world_size)

    assert_equals_one_process(ranks, accumulate, BY_LABEL[label].tolerance)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("label", "num_devices"), [(case.label, num) for case in CASES for num in case.devices_per_process]
)
def test_training_on_several_devices_equals_one(label: str, accumulate: int, num_devices: int) -> None:
    strategy = BY_LABEL[label].strategy()
    losses, weights = fit_regression(NUM_STEPS, accumulate, num_ranks=1, devices=num_devices, strategy=strategy)

    # The replicas append their losses to one list, step by step.
    of_steps = torch.tensor(losses).view(-1, num_devices).mean(dim=1).tolist()
    assert_equals_one_process([(of_steps, weights)], accumulate, BY_LABEL[label].tolerance)
