"""Training in a pipeline equals training in one process."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lightning_paral import ActivationCheckpointing, ParalPipelineStrategy
from tests.models.chain import Block, Chain, Result, assert_equal_to, result_of_fit


class Counts(Chain):
    """Has eight blocks, and a buffer that each step counts in, whose value is that of the last part of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.register_buffer("steps", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1.0
        super().validation_step(batch, batch_idx)


@cache
def in_one_process(accumulate: int, module: Any = Chain) -> Result:
    return result_of_fit("auto", 1, module=module, accumulate_grad_batches=accumulate)


def in_pipeline(world_size: int, accumulate: int, options: dict[str, Any], module: Any = Chain) -> Result:
    strategy = ParalPipelineStrategy(split="global", **options)
    return result_of_fit(strategy, world_size, module=module, accumulate_grad_batches=accumulate)


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


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        *((2, {"micro_batches": micro_batches}) for micro_batches in (1, 2, 5)),
        (4, {}),
        (4, {"micro_batches": 5}),
        (2, {"last_stage": ["back", "out"]}),
        (2, {"balance": [1, 2, 2, 3], "activation_checkpointing": ActivationCheckpointing()}),
        (1, {}),
        (4, {"stages": 2}),
        (4, {"stages": 2, "shard": True, "checkpoint": "full"}),
    ],
    ids=str,
)
def test_interleaved_parts_equal_one_process(
    on_ranks, world_size: int, options: dict[str, Any], accumulate: int
) -> None:
    options = {"schedule": "interleaved", **options}
    expected = in_one_process(accumulate, Counts)
    assert_equal_to(expected, on_ranks(world_size, in_pipeline, world_size, accumulate, options, Counts))
