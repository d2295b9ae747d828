"""A rank that fails is named by other ranks that have ended their fit already, and are in the teardown."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_paral import RankFailedError
from lightning_paral.distributed.process_group import release_process_group
from tests.contract.cases import strategy_of
from tests.launching import leave_pool
from tests.models.linear import Linear
from tests.running import quiet_trainer


class FailsAtEnd(Linear):
    """Rank 0 fails at the end of the fit, while rank 1 returns its weights to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = 30.0

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            time.sleep(1.0)
            raise ValueError("my bug")

    def cpu(self) -> "FailsAtEnd":
        if dist.is_initialized() and dist.get_rank() == 1:
            sleeps, self.sleeps = self.sleeps, 0.0
            time.sleep(sleeps)
        return super().cpu()


def fit(label: str) -> str:
    """Fit in a process group that the strategy creates, and return the error of this rank."""
    leave_pool()
    before = vars(DTensor)["full_tensor"]
    trainer = quiet_trainer(devices=2, strategy=strategy_of(label), max_steps=1)
    try:
        with pytest.raises((ValueError, RankFailedError)) as error:
            trainer.fit(FailsAtEnd(), DataLoader(torch.ones(8, 4), batch_size=2))
        assert vars(DTensor)["full_tensor"] is before, "what a run replaces in torch is there again"
        return f"{error.type.__name__}: {error.value}"
    finally:
        release_process_group(after_failure=True)


@pytest.mark.lane("full")
@pytest.mark.parametrize("label", ["paral_ddp", "paral_fsdp"])
def test_failure_is_named_in_the_teardown_of_another_rank(in_own_world: Any, label: str) -> None:
    first, second = in_own_world(2, fit, label, timeout=60.0)

    assert first == "ValueError: my bug"
    assert second.startswith("RankFailedError: Rank 1 ended because rank 0")
    assert second.endswith("ValueError: my bug")
