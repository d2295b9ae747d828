"""A user's training script, which the tests of launching start: `launched.py SCENARIO RESULT_FOLDER [ARGUMENT ...]`.

Each rank writes what it saw to `RESULT_FOLDER/rank-R.json`.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import KubeflowEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_paral  # noqa: F401  registers the names
from lightning_paral import ParalDDPStrategy
from lightning_paral.comm import count_traffic
from tests.distributed.launch.test_clusters import OwnEnvironment
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

ENVIRONMENTS = {"kubeflow": KubeflowEnvironment, "own": OwnEnvironment}
ONE_DEVICE_PER_NODE = ("kubeflow", "torchrun_on_two_nodes")


class Witness(Callback):
    """Records the properties of the process group during training."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend()}


def fit(model: Regression, **options: Any) -> dict[str, object]:
    witness = Witness()
    trainer = quiet_trainer(**({"devices": 2, "max_epochs": 1, "callbacks": [witness]} | options))
    trainer.fit(model, regression_data(4, 2))
    ones = torch.ones(())
    dist.all_reduce(ones)  # as under Lightning's `ddp`
    return witness.seen | {"sum_after": ones.item(), "weight": model.out.weight.sum().item()}


def two_fits() -> object:
    torch.manual_seed(0)
    with count_traffic() as traffic:
        first = fit(Regression(), strategy="paral_ddp")
        second = fit(Regression(), strategy=ParalDDPStrategy(all_reduce="ring", static_graph=True))
    return {"fits": [first, second], "payload_bytes": traffic.payload_bytes}


def nobody_else_comes() -> object:
    return fit(Regression(), strategy=ParalDDPStrategy(timeout=timedelta(seconds=3)))


def cluster(name: str, strategy: str) -> object:
    plugins = [ENVIRONMENTS[name]()] if name in ENVIRONMENTS else []
    devices, num_nodes = (1, 2) if name in ONE_DEVICE_PER_NODE else (2, 1)
    return fit(Regression(), strategy=strategy, devices=devices, num_nodes=num_nodes, plugins=plugins)


if __name__ == "__main__":
    scenario, folder, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    report = globals()[scenario](*arguments)
    rank = dist.get_rank() if dist.is_initialized() else 0
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(report))
