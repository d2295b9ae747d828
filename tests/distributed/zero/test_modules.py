"""Modules that were not written for ZeRO train as in one process at every stage."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_paral import ParalZeROStrategy
from lightning_paral.model import host_memory_check as room
from lightning_paral.model.deferred import recorder
from tests.models.built_late import BuiltLate
from tests.models.tokens import token_loader
from tests.running import quiet_trainer

NUM_BATCHES = 5


def losses_of_late_model(
    num_ranks: int, strategy: Callable[[], Any] = lambda: "auto"
) -> tuple[list[float], list[tuple[int, ...]]]:
    torch.manual_seed(5)
    model = BuiltLate()
    for _ in range(2):  # the second fit continues with the parameters of the first
        trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy())
        trainer.fit(model, token_loader(NUM_BATCHES, num_ranks))
    return model.losses, [tuple(p.shape) for p in model.parameters()]


def losses_of_late_model_without_room() -> tuple[list[float], list[tuple[int, ...]]]:
    available, room.available_bytes = room.available_bytes, lambda: 0
    try:
        return losses_of_late_model_on_rank()
    finally:
        room.available_bytes = available


def losses_of_late_model_on_rank() -> tuple[list[float], list[tuple[int, ...]]]:
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorder, "DEFERRED_BYTES", 16)
        return losses_of_late_model(2, lambda: ParalZeROStrategy(stage=3, deepspeed_config=config))


@pytest.mark.parametrize("has_room", [True, False])
def test_parameters_are_full_after_the_run_if_memory_suffices(on_ranks, has_room: bool) -> None:
    expected, whole = losses_of_late_model(1)

    ranks = on_ranks(2, losses_of_late_model_on_rank if has_room else losses_of_late_model_without_room)

    losses = torch.tensor([losses for losses, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=0.0)
    for _, shapes in ranks:
        assert shapes == (whole if has_room else [(0,)] * len(whole))
