"""Ranks that differ only in their tensor coordinate draw the same samples, and each sample counts once."""

from typing import Any

import pytest
import torch

from lightning_paral import ParalDDPStrategy
from lightning_paral.distributed.mesh import ParallelDims
from tests.contract.cases import BY_LABEL, variant
from tests.contract.test_sampling import assert_evaluation_equals, mean_losses
from tests.models.judged import evaluate, train


class InPairs(ParalDDPStrategy):
    """Two neighboring ranks compute the same, as in tensor parallelism, but with undivided layers."""

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(rank=self.global_rank, replicate=self.world_size // 2, tensor=2)


def in_pairs(run: Any, *args: Any) -> Any:
    BY_LABEL["in_pairs"] = variant("in_pairs", InPairs)
    return run("in_pairs", *args)


@pytest.mark.parametrize("split", ["batch", "global"])
def test_evaluation_equals_one_process(on_ranks, split: str) -> None:
    ranks = on_ranks(4, in_pairs, evaluate, 4, split)

    for first in (0, 1):
        assert_evaluation_equals(ranks[first::2], evaluate("one process", 1, "batch"))


def test_training_on_global_batches_equals_one_process(on_ranks) -> None:
    (expected,) = on_ranks(1, train, "paral_ddp", 1, {"split": "global"}, {})

    ranks = on_ranks(4, in_pairs, train, 4, {"split": "global"}, {})

    for first, second in (ranks[:2], ranks[2:]):
        assert first["losses"] == second["losses"]
    torch.testing.assert_close(mean_losses(ranks[::2]), mean_losses([expected]), rtol=1e-5, atol=0.0)
    for rank in ranks:
        for name, weight in rank["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][name], rtol=0.0, atol=1e-5)
        assert rank["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
