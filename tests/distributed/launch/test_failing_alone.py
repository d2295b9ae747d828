"""A rank that fails alone ends the others, also if they cannot notice it by an exception, as with NCCL (simulated)."""

import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral import ConfigurationError
from lightning_paral.distributed import failure
from lightning_paral.distributed import process_group as groups
from lightning_paral.errors import RankFailedError
from lightning_paral.strategies import base
from tests.contract.cases import PER_ENGINE, labels, strategy_of, with_ranks
from tests.launching import leave_pool
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class FailsAlone(Regression):
    """Fails on rank 1 in its second step, in which rank 0 sleeps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            if self.global_rank == 0:
                time.sleep(100)
            raise KeyError(f"of rank {self.global_rank}")
        return super().training_step(batch, batch_idx)


def fail_alone(label: str) -> tuple[list[str], str]:
    leave_pool()
    happened: list[str] = []
    patch = pytest.MonkeyPatch()
    abort_before = groups.abort_all
    patch.setattr(base, "nccl_backends", lambda: [object()])
    patch.setattr(failure, "abort_nccl", lambda: happened.append("woken"))
    patch.setattr(base, "abort_nccl", lambda: happened.append("aborted NCCL"))

    def abort_all() -> None:
        happened.append("aborted all")
        abort_before()

    patch.setattr(groups, "abort_all", abort_all)
    model = FailsAlone()
    trainer = quiet_trainer(strategy=strategy_of(label), devices=2, max_epochs=1)

    def pretend() -> None:
        groups._owned = replace(groups._owned, backend="cuda:nccl,cpu:gloo")

    model.on_train_start = pretend
    stores: list[Any] = []
    model.on_train_epoch_start = lambda: stores.append(dist.distributed_c10d._get_default_store())
    error: BaseException | None = None
    try:
        trainer.fit(model, regression_data(2, 2))
    except (KeyError, RankFailedError) as raised:
        error = raised
    finally:
        patch.undo()
    assert not dist.is_initialized()
    threads = {thread.name for thread in threading.enumerate()}
    assert threads.isdisjoint({"lightning_paral_guard", "lightning_paral_watcher"})
    return happened, repr(error)


@pytest.mark.lane("default")
@pytest.mark.parametrize("label", labels(with_ranks(PER_ENGINE, 2)))
def test_a_rank_that_fails_alone_aborts_and_wakes_the_others(in_own_world, label: str) -> None:
    told = in_own_world(2, fail_alone, label)

    assert [happened for happened, _ in told] == [
        ["woken", "aborted NCCL", "aborted all"],
        ["aborted NCCL", "aborted all"],
    ]
    assert told[1][1] == "KeyError('of rank 1')"
    assert 'RankFailedError("Rank 0 ended because rank 1 (' in told[0][1]
    assert ") failed in training batch 1 of epoch 0 (global step 1): KeyError: 'of rank 1'" in told[0][1]


def test_backends_are_widened_by_one_for_tensors_on_the_host(monkeypatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    cuda = torch.device("cuda")
    widened = "cuda:nccl,cpu:gloo"

    for requested in (None, "nccl", "cuda:nccl", widened):
        assert groups.backend_for(cuda, requested) == widened
    for requested in ("gloo", "ucc", "cpu:gloo,cuda:ucc"):
        assert groups.backend_for(cuda, requested) == requested
    assert groups.backend_for(torch.device("cpu"), "gloo") == "gloo"


def fit_in_a_group_for_cuda_only(folder: str) -> str:
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    store.set(f"joined {rank}", b"")
    store.wait(["joined 0", "joined 1"])  # a rank that ends its group early would break the other's connection
    with pytest.raises(ConfigurationError) as error:
        quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1).fit(Regression(), regression_data(2, 2))
    dist.destroy_process_group()
    return str(error.value)


def test_a_group_for_cuda_only_is_refused(in_own_world, tmp_path) -> None:
    for message in in_own_world(2, fit_in_a_group_for_cuda_only, str(tmp_path)):
        assert "(backend 'cuda:gloo')" in message
        assert "init_process_group('cuda:nccl,cpu:gloo')" in message
