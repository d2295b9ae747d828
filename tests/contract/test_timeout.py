"""The option `timeout` holds in every process group of a run, whoever creates it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.device_mesh import init_device_mesh

from lightning_paral import CheckpointOptions
from lightning_paral.distributed.process_group import release_process_group
from tests.contract.cases import BY_LABEL, CASES, labels, with_ranks
from tests.launching import leave_pool
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

SECONDS = 77.0
TORCHS_SECONDS = 1800.0


def timeouts() -> list[float]:
    """Return the timeouts, in seconds, of all gloo groups of this process."""
    cpu = torch.device("cpu")
    backends = [group._get_backend(cpu) for group in dist.distributed_c10d._world.pg_map]
    return sorted({backend.options._timeout.total_seconds() for backend in backends})


class AtTheEnd(Callback):
    """Saves in the background, creates groups as a user would, and records the timeouts of all groups."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)
        dist.new_group([0, 1])
        dist.new_subgroups(1)
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        self.seen = timeouts()


def fit_and_list(label: str, path: str) -> Any:
    leave_pool()
    options: dict[str, Any] = {"timeout": SECONDS, "checkpoint": CheckpointOptions(async_save=True)}
    at_the_end = AtTheEnd(path)
    trainer = quiet_trainer(
        devices=2, max_epochs=1, strategy=BY_LABEL[label].strategy(**options), callbacks=[at_the_end]
    )
    try:
        trainer.fit(Regression(), regression_data(2, 2))
        dist.new_group([0, 1])
        dist.new_subgroups(1)
        return at_the_end.seen, timeouts()
    finally:
        release_process_group()


@pytest.mark.parametrize("label", labels(with_ranks(CASES, 2)))
def test_every_group_of_a_run_has_the_timeout_of_the_option(in_own_world, tmp_path, label: str) -> None:
    told = in_own_world(2, fit_and_list, label, str(tmp_path / "saved"))

    # A group that is created after the run has torch's timeout again.
    assert told == [([SECONDS], [SECONDS, TORCHS_SECONDS])] * 2
