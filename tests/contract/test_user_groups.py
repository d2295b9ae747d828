"""Process groups of some ranks, which user code has created before a fit, do not disturb it."""

import pytest
import torch.distributed as dist

from tests.contract.cases import BY_LABEL, PER_ENGINE, labels, with_ranks
from tests.models.regression import fit_regression

NUM_RANKS = 4


def fit_beside_groups(label: str) -> list[list[float]]:
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    dist.new_group([0, 2])
    first, _ = fit_regression(2, 1, NUM_RANKS, strategy=BY_LABEL[label].strategy(timeout=60))
    dist.new_group([1, 2, 3])
    second, _ = fit_regression(2, 1, NUM_RANKS, strategy=BY_LABEL[label].strategy(timeout=60))
    return [first, second]


@pytest.mark.parametrize("label", [*labels(with_ranks(PER_ENGINE, NUM_RANKS)), "fsdp_hybrid"])
def test_groups_of_some_ranks_do_not_disturb_a_fit(in_own_world, label: str) -> None:
    for first, second in in_own_world(NUM_RANKS, fit_beside_groups, label):
        assert len(first) == 2
        assert second == pytest.approx(first)
