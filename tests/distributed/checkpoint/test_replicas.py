"""Of replicas with different values, a checkpoint has those of rank 0, never parts of several."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalZeROStrategy
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.exchange import RankGroup
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Saves(Callback):
    """Changes a weight of rank 1 at the end, saves, and records the weights of this rank."""

    def __init__(self, path: str, drift: str) -> None:
        self.path = path
        self.drift = drift
        self.weights: dict[str, Tensor] = {}

    def on_train_end(self, trainer, module) -> None:
        if trainer.global_rank == 1:
            parameter = dict(module.named_parameters())[self.drift]
            local = getattr(parameter, "_local_tensor", parameter)
            local.detach().view(-1).add_(1.0)
        trainer.save_checkpoint(self.path)
        values = {name: getattr(value, "_local_tensor", value) for name, value in module.state_dict().items()}
        self.weights = {name: value.detach().clone() for name, value in values.items()}


class Frozen(Regression):
    """Has a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = torch.nn.Linear(40, 40).requires_grad_(False)


def fit(path: str, strategy: object, drift: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    saves = Saves(path, drift)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[saves])
    trainer.fit(Frozen(), regression_data(4, 2))
    return saves.weights


MADE: dict[str, Any] = {
    "ddp": ParalDDPStrategy,
    "ddp_sharded": partial(ParalDDPStrategy, checkpoint="sharded"),
    "zero1": partial(ParalZeROStrategy, stage=1, checkpoint="full"),
    "hybrid": partial(ParalFSDPStrategy, replicate=2, checkpoint="full"),
}


def fit_by_name(path: str, name: str, drift: str) -> dict[str, Tensor]:
    return fit(path, MADE[name](), drift)


@pytest.mark.parametrize(
    ("name", "drift"),
    [("ddp", "hidden.weight"), ("ddp_sharded", "fixed.weight"), ("zero1", "fixed.weight"), ("hybrid", "hidden.weight")],
)
def test_the_replica_of_rank_0_is_saved(on_ranks, tmp_path: Path, name: str, drift: str) -> None:
    path = str(tmp_path / "saved.ckpt")

    first, second = on_ranks(2, fit_by_name, path, name, drift)

    assert not torch.equal(first[drift], second[drift])
    assert torch.equal(load(path, RankGroup())["state_dict"][drift].clone(), first[drift])
