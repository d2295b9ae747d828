"""Training under every strategy, at any world size, equals one process with the same global batch."""

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.contract.cases import BY_LABEL, CASES
from tests.models import fit_regression

pytestmark = pytest.mark.usefixtures("deepspeed_operators")

NUM_STEPS = 20


@cache
def fit_in_one_process(accumulate: int) -> tuple[list[float], dict[str, Tensor]]:
    return fit_regression(NUM_STEPS, accumulate, num_ranks=1)


def fit_by_case(label: str, accumulate: int, num_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    return fit_regression(NUM_STEPS, accumulate, num_ranks, strategy=BY_LABEL[label].strategy())


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("label", "world_size"), [(case.label, world_size) for case in CASES for world_size in case.world_sizes]
)
def test_training_equals_one_process(on_ranks, label: str, accumulate: int, world_size: int) -> None:
    tolerance = BY_LABEL[label].tolerance
    expected_losses, expected_weights = fit_in_one_process(accumulate)

    ranks = on_ranks(world_size, fit_by_case, label, accumulate, world_size)

    losses = torch.tensor([rank_losses for rank_losses, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected_losses), rtol=tolerance, atol=0.0)
    for _, weights in ranks:
        assert weights.keys() == expected_weights.keys()
        for name, weight in weights.items():
            assert (weight - expected_weights[name]).abs().max() <= tolerance, name
