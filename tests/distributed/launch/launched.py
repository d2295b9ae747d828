"""A user's training script, which the tests of launching start: `launched.py SCENARIO RESULT_FOLDER`.

Each rank writes what it saw to `RESULT_FOLDER/rank-R.json`.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_paral  # noqa: F401  registers the names
from lightning_paral import ParalDDPStrategy
from lightning_paral.comm import count_traffic
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

NUM_NODES = int(os.environ.get("TEST_NUM_NODES", "1"))
DEVICES = 2 // NUM_NODES


class Witness(Callback):
    """Records the properties of the process group during training."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "backend": dist.get_backend(),
            "timeout": dist.distributed_c10d._get_default_timeout(dist.Backend("gloo")).total_seconds(),
        }


class Trouble(Regression):
    """Rank 1 sleeps or fails in its third step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if batch_idx == 2 and dist.get_rank() == 1:
            if self.kind == "sleep":
                time.sleep(40)
            raise ValueError("the reason why rank 1 failed")


def fit(model: Regression, **options: object) -> dict[str, object]:
    witness = Witness()
    trainer = quiet_trainer(devices=DEVICES, num_nodes=NUM_NODES, max_epochs=1, callbacks=[witness], **options)
    trainer.fit(model, regression_data(5, 2))
    ones = torch.ones(())
    dist.all_reduce(ones)  # as under Lightning's `ddp`
    return witness.seen | {"sum_after": ones.item(), "weight": model.out.weight.sum().item()}


def two_fits() -> object:
    torch.manual_seed(0)
    with count_traffic() as traffic:
        first = fit(Regression(), strategy="paral_ddp")
        second = fit(
            Regression(), strategy=ParalDDPStrategy(all_reduce="ring", timeout=timedelta(seconds=90), static_graph=True)
        )
    return {"fits": [first, second], "payload_bytes": traffic.payload_bytes}


def rank_one_fails() -> object:
    return fit(Trouble("raise"), strategy="paral_ddp")


def rank_one_sleeps(**options: Any) -> object:
    fit(Regression(), strategy="paral_ddp")  # both ranks have started when the timeout begins
    return fit(Trouble("sleep"), strategy=ParalDDPStrategy(timeout=timedelta(seconds=12), **options))


def rank_one_sleeps_in_ring() -> object:
    return rank_one_sleeps(all_reduce="ring")


def nobody_else_comes() -> object:
    return fit(Regression(), strategy=ParalDDPStrategy(timeout=timedelta(seconds=3)))


if __name__ == "__main__":
    scenario, folder = sys.argv[1:]
    torch.set_num_threads(1)
    report = globals()[scenario]()
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or os.environ.get("TEST_NODE_RANK")
    (Path(folder) / f"rank-{rank or os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
