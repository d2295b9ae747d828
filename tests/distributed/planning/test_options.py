"""What the options of a strategy change in memory and traffic is predicted."""

from typing import Any

import pytest
import torch

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalZeROStrategy, plan
from lightning_paral.planning.estimate import Estimate
from tests.distributed.planning.measured import LENGTH, NUM_LAYERS, WIDTH, fit, peak_of
from tests.rank_pool import RankPool
from tests.unit.planning.models import gpt

BATCH_SIZE = 8


def planned(strategy: Any, num_ranks: int, batch_size: int = BATCH_SIZE) -> Estimate:
    batch = torch.zeros((), dtype=torch.long).expand(batch_size, LENGTH)
    made = plan(gpt(WIDTH, NUM_LAYERS), (batch, batch), num_ranks, strategies=[strategy], device_type="cpu")
    return made.estimates[0]


def peak_in_fit(cls: type, options: dict[str, Any]) -> int:
    _, mark, profiled = fit(cls(**options), BATCH_SIZE)
    return peak_of(mark, profiled)


MEMORY: list[tuple[int, type, dict[str, Any]]] = [
    (2, ParalDDPStrategy, {"gradient_as_bucket_view": True}),
    (2, ParalFSDPStrategy, {"reshard_after_forward": False}),
    (2, ParalZeROStrategy, {"stage": 2, "reduce_bucket_numel": 200_000}),
    (4, ParalFSDPStrategy, {"replicate": 2}),
]


def test_memory_with_options_is_predicted_within_a_tenth(fresh_ranks: RankPool) -> None:
    for num_ranks, cls, options in MEMORY:
        expected = max(fresh_ranks.run(num_ranks, peak_in_fit, cls, options))
        found = planned(cls(**options), num_ranks).memory.peak_bytes

        assert found == pytest.approx(expected, rel=0.10), (cls.__name__, options)
