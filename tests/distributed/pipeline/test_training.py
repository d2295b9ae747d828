"""Training in a pipeline equals training in one process."""

from functools import cache
from typing import Any

import pytest

from lightning_paral import ParalPipelineStrategy
from tests.models.chain import Result, assert_equal_to, result_of_fit


@cache
def in_one_process(accumulate: int) -> Result:
    return result_of_fit("auto", 1, accumulate_grad_batches=accumulate)


def in_pipeline(world_size: int, accumulate: int, options: dict[str, Any]) -> Result:
    strategy = ParalPipelineStrategy(split="global", **options)
    return result_of_fit(strategy, world_size, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        *(
            (world_size, {"schedule": schedule, "micro_batches": micro_batches})
            for world_size in (2, 4)
            for schedule in ("gpipe", "1f1b")
            for micro_batches in (1, 2, 5)
        ),
        (1, {}),
        (2, {"balance": [1, 3]}),
        (2, {"stages": 1}),
        (4, {"stages": 2}),
        (4, {"stages": 2, "checkpoint": "full"}),
    ],
    ids=str,
)
def test_pipeline_equals_one_process(on_ranks, world_size: int, options: dict[str, Any], accumulate: int) -> None:
    assert_equal_to(in_one_process(accumulate), on_ranks(world_size, in_pipeline, world_size, accumulate, options))
