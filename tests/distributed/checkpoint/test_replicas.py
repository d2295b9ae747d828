"""Of replicas with different values, a checkpoint has those of rank 0, never parts of several."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalZeROStrategy
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.exchange import RankGroup
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Saves(Callback):
    """Changes a weight of rank 1 at the end if the test asks for it, saves, and records the weights of this rank."""

    def __init__(self, path: str, drift: str | None) -> None:
        self.path = path
        self.drift = drift
        self.weights: dict[str, Tensor] = {}

    def on_train_end(self, trainer, module) -> None:
        if self.drift is not None and trainer.global_rank == 1:
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


def fit(path: str, strategy: object, drift: str | None, *callbacks: Callback) -> dict[str, Tensor]:
    torch.manual_seed(0)
    saves = Saves(path, drift)
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[*callbacks, saves])
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


class OneNodePerRank(Callback):
    """Makes post-local SGD treat each rank as a node."""

    def __init__(self, state: PostLocalSGDState) -> None:
        self.state = state

    def on_fit_start(self, trainer, module) -> None:
        self.state.subgroup, _ = dist.new_subgroups(group_size=1)


def fit_with_local_sgd(path: str, period: int) -> dict[str, Tensor]:
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=1)
    strategy = ParalDDPStrategy(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=period)
    return fit(path, strategy, None, OneNodePerRank(state))


def test_rank_zeros_replica_is_saved_between_averagings_of_local_sgd(on_ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")

    first, second = on_ranks(2, fit_with_local_sgd, path, 100)

    assert not torch.equal(first["hidden.weight"], second["hidden.weight"])
    saved = load(path, RankGroup())["state_dict"]
    assert all(torch.equal(saved[name].clone(), value) for name, value in first.items())


def test_local_sgd_averages_weights_after_each_period(on_ranks, tmp_path: Path) -> None:
    first, second = on_ranks(2, fit_with_local_sgd, str(tmp_path / "saved.ckpt"), 1)

    assert all(torch.equal(second[name], value) for name, value in first.items())
