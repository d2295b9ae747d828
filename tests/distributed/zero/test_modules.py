"""Modules that were not written for ZeRO train as in one process at every stage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_paral import ConfigurationError, ParalZeROStrategy
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


def partitioning() -> ParalZeROStrategy:
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    return ParalZeROStrategy(stage=3, deepspeed_config=config)


def losses_of_late_model_on_rank() -> tuple[list[float], list[tuple[int, ...]]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorder, "DEFERRED_BYTES", 16)
        return losses_of_late_model(2, partitioning)


def test_parameters_are_full_after_the_run(on_ranks) -> None:
    expected, whole = losses_of_late_model(1)

    ranks = on_ranks(2, losses_of_late_model_on_rank)

    losses = torch.tensor([losses for losses, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=0.0)
    for _, shapes in ranks:
        assert shapes == whole


def fit_without_room(path: str) -> tuple[set[tuple[int, ...]], dict[str, Tensor]]:
    """Return the shapes after a fit whose weights do not fit into host memory, and the weights of a resumed fit."""

    def fit(module: BuiltLate, num_epochs: int, **options: Any) -> Trainer:
        torch.manual_seed(5)
        trainer = quiet_trainer(max_epochs=num_epochs, devices=2, strategy=partitioning())
        trainer.fit(module, token_loader(NUM_BATCHES, 2), **options)
        return trainer

    module, resumed = BuiltLate(), BuiltLate()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recorder, "DEFERRED_BYTES", 16)
        patched.setattr(room, "available_bytes", lambda: 0)
        fit(module, 1).save_checkpoint(path)
        with pytest.raises(ConfigurationError, match=r"partitioned already.*load a checkpoint"):
            fit(module, 1)
    fit(resumed, 2, ckpt_path=path)
    return {tuple(p.shape) for p in module.parameters()}, resumed.state_dict()


def test_weights_without_room_after_the_run_can_be_saved_but_not_trained(on_ranks, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = BuiltLate()
    quiet_trainer(max_epochs=2).fit(expected, token_loader(NUM_BATCHES, 1))

    for shapes, weights in on_ranks(2, fit_without_room, str(tmp_path / "x.ckpt")):
        assert shapes == {(0,)}
        for name, weight in expected.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=0.0, atol=1e-5)
