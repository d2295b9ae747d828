"""Where local SGD has to equal DDP, it does in float64, and where it has to differ, it does."""

from typing import Any

import pytest

from tests.distributed.local_sgd.training import ddp, distance, fit, local

EXACT = 1e-12


def from_ddp(optimizer: str, strategy: dict[str, Any], of_ddp: str = "", **options: Any) -> float:
    """Return how far a fit under local SGD ends from one under DDP."""
    return distance(fit(local(**strategy), optimizer, **options), fit(ddp(), of_ddp or optimizer, **options))


LINEAR = {"is_linear": True, "same_features": True}


@pytest.mark.parametrize(
    ("ranks", "optimizer", "strategy", "options"),
    [
        *((2, each, {}, {}) for each in ("plain", "momentum", "nesterov")),
        (3, "momentum", {"backup": "device"}, {"accumulate_grad_batches": 2}),
        (4, "momentum", {"islands": 2}, {}),
        (2, "plain", {"outer_momentum": 0.9, "nesterov": True}, {"of_ddp": "nesterov"}),
        (2, "plain", {"period": 3}, LINEAR),
        (2, "momentum", {"period": 4}, LINEAR),  # ends inside a period
        (2, "adamw", {"period": 100, "warmup_steps": 6}, {"gradient_clip_val": 0.5}),
    ],
)
def test_equals_ddp(on_ranks, ranks: int, optimizer: str, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    assert max(on_ranks(ranks, call, optimizer, strategy, options)) < EXACT


@pytest.mark.parametrize(
    ("optimizer", "strategy", "options"),
    [
        ("adamw", {}, {}),
        ("plain", {"period": 2}, {}),
        ("plain", {"period": 3}, {"is_linear": True}),  # other features on each rank
        ("nesterov", {"outer_momentum": 0.9, "nesterov": True}, {}),
        ("adamw", {"warmup_steps": 4}, {}),
    ],
)
def test_differs_from_ddp(on_ranks, optimizer: str, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    assert min(on_ranks(2, call, optimizer, strategy, options)) > 1e-6


def call(optimizer: str, strategy: dict[str, Any], options: dict[str, Any]) -> float:
    return from_ddp(optimizer, strategy, **options)
