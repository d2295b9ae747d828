"""A user's training script, which the tests of launching start: `launched.py SCENARIO RESULT_FOLDER`.

Each rank writes what it saw to `RESULT_FOLDER/rank-R.json`.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

import lightning_paral  # noqa: F401  registers the names
from lightning_paral import ParalDDPStrategy
from lightning_paral.comm import count_traffic
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Witness(Callback):
    """Records the properties of the process group during training."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend()}


class Fails(Regression):
    """Rank 1 fails in its third step."""

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        if batch_idx == 2 and dist.get_rank() == 1:
            raise ValueError("the reason why rank 1 failed")


def fit(model: Regression, **options: object) -> dict[str, object]:
    witness = Witness()
    trainer = quiet_trainer(devices=2, max_epochs=1, callbacks=[witness], **options)
    trainer.fit(model, regression_data(5, 2))
    ones = torch.ones(())
    dist.all_reduce(ones)  # as under Lightning's `ddp`
    return witness.seen | {"sum_after": ones.item(), "weight": model.out.weight.sum().item()}


def two_fits() -> object:
    torch.manual_seed(0)
    with count_traffic() as traffic:
        first = fit(Regression(), strategy="paral_ddp")
        second = fit(Regression(), strategy=ParalDDPStrategy(all_reduce="ring", static_graph=True))
    return {"fits": [first, second], "payload_bytes": traffic.payload_bytes}


def rank_one_fails() -> object:
    return fit(Fails(), strategy="paral_ddp")


def nobody_else_comes() -> object:
    return fit(Regression(), strategy=ParalDDPStrategy(timeout=timedelta(seconds=3)))


if __name__ == "__main__":
    scenario, folder = sys.argv[1:]
    torch.set_num_threads(1)
    report = globals()[scenario]()
    (Path(folder) / f"rank-{os.environ.get('RANK') or os.environ['LOCAL_RANK']}.json").write_text(json.dumps(report))
