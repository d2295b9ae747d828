"""Training with layers that are split over tensor ranks equals training in one process."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ActivationCheckpointing, ParalFSDPStrategy
from tests.models.chain import NUM_BATCHES, fit_chain
from tests.models.split_layers import PLAN, SplitLayers

Result = tuple[list[float], dict[str, Tensor], dict[str, float]]


def result_of(fitted: Any) -> Result:
    losses, module, trainer = fitted
    weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    return list(losses.values()), weights, {name: float(value) for name, value in trainer.callback_metrics.items()}


def fit(strategy: Any, world_size: int, accumulate: int) -> Result:
    torch.manual_seed(3)
    return result_of(fit_chain(strategy, world_size, module=SplitLayers(), accumulate_grad_batches=accumulate))


@cache
def in_one_process(accumulate: int) -> Result:
    return fit("auto", 1, accumulate)


def on_tensor_ranks(world_size: int, accumulate: int, options: dict[str, Any]) -> Result:
    plan = {name: style for name, style in PLAN.items() if options["tensor_parallel"] != 4 or name != "out"}
    return fit(ParalFSDPStrategy(split="global", plan=plan, **options), world_size, accumulate)


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
        (4, {"tensor_parallel": 2, "checkpoint": "full", "divergence_check_every": 1, "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_tensor_parallel_equals_one_process(
    on_ranks, world_size: int, options: dict[str, Any], accumulate: int
) -> None:
    expected_losses, expected_weights, expected_metrics = in_one_process(accumulate)

    ranks = on_ranks(world_size, on_tensor_ranks, world_size, accumulate, options)

    assert len(expected_losses) == NUM_BATCHES
    mean = torch.tensor([losses for losses, _, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(mean, torch.tensor(expected_losses), rtol=1e-5, atol=0.0)
    for _, weights, metrics in ranks:
        assert weights.keys() == expected_weights.keys()
        for name, weight in weights.items():
            assert (weight - expected_weights[name]).abs().max() <= 1e-5, name
        for name in ("train_loss_epoch", "val_loss"):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name
