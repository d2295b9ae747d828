"""Training in a pipeline equals training in one process."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ParalPipelineStrategy
from tests.models.chain import NUM_BATCHES, fit_chain

Result = tuple[list[float], dict[str, Tensor], dict[str, float]]


def result_of(fitted: Any) -> Result:
    losses, module, trainer = fitted
    weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    return list(losses.values()), weights, {name: float(value) for name, value in trainer.callback_metrics.items()}


@cache
def in_one_process(accumulate: int) -> Result:
    return result_of(fit_chain("auto", 1, accumulate_grad_batches=accumulate))


def in_pipeline(world_size: int, accumulate: int, options: dict[str, Any]) -> Result:
    return result_of(
        fit_chain(ParalPipelineStrategy(split="global", **options), world_size, accumulate_grad_batches=accumulate)
    )


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
        (4, {"stages": 2, "checkpoint": "full", "divergence_check_every": 1}),
    ],
    ids=str,
)
def test_pipeline_equals_one_process(on_ranks, world_size: int, options: dict[str, Any], accumulate: int) -> None:
    expected_losses, expected_weights, expected_metrics = in_one_process(accumulate)

    ranks = on_ranks(world_size, in_pipeline, world_size, accumulate, options)

    assert len(expected_losses) == NUM_BATCHES
    mean = torch.tensor([losses for losses, _, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(mean, torch.tensor(expected_losses), rtol=1e-5, atol=0.0)
    for _, weights, metrics in ranks:
        assert weights.keys() == expected_weights.keys()
        for name, weight in weights.items():
            assert (weight - expected_weights[name]).abs().max() <= 1e-5, name
        for name in ("train_loss_epoch", "val_loss"):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name
