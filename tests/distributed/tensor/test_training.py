"""Training with layers that are split over tensor ranks equals training in one process."""

from functools import cache
from typing import Any

import pytest

from lightning_paral import ActivationCheckpointing, ParalFSDPStrategy
from tests.models.chain import Result, assert_equal_to, result_of_fit
from tests.models.split_layers import PLAN, SplitLayers


@cache
def in_one_process(accumulate: int) -> Result:
    return result_of_fit("auto", 1, module=SplitLayers, accumulate_grad_batches=accumulate)


def on_tensor_ranks(world_size: int, accumulate: int, options: dict[str, Any]) -> Result:
    plan = {name: style for name, style in PLAN.items() if options["tensor_parallel"] != 4 or name != "out"}
    strategy = ParalFSDPStrategy(split="global", plan=plan, **options)
    return result_of_fit(strategy, world_size, module=SplitLayers, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"tensor_parallel": 2}),
        (2, {"tensor_parallel": "node"}),
        (4, {"tensor_parallel": 4}),
        (4, {"tensor_parallel": 2}),
        (4, {"tensor_parallel": 2, "replicate": 2}),
        (4, {"tensor_parallel": 2, "units": ["Linear"], "accumulate": "unsharded"}),
        (2, {"tensor_parallel": 2, "activation_checkpointing": ActivationCheckpointing(units=["Block"])}),
        (4, {"tensor_parallel": 2, "checkpoint": "full", "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_tensor_parallel_equals_one_process(
    on_ranks, world_size: int, options: dict[str, Any], accumulate: int
) -> None:
    assert_equal_to(in_one_process(accumulate), on_ranks(world_size, on_tensor_ranks, world_size, accumulate, options))
