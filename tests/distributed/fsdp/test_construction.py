"""Models built in `configure_model` have the values that one process draws, and ranks hold few of them at once."""

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_paral import ParalFSDPStrategy
from lightning_paral.model.deferred import recorder
from lightning_paral.model.deferred.construction import recording
from tests.models.built_late import BuiltLate
from tests.models.tokens import Fitted, fit, token_loader
from tests.running import assert_same_fit, quiet_trainer

NUM_BATCHES = 3


def test_list_that_two_modules_hold_stays_one() -> None:
    module = LightningModule()
    with recording(module, torch.device("cpu"), Precision()) as deferred:
        module.first, module.second = nn.Identity(), nn.Identity()
        module.first.bank = module.second.bank = [torch.ones(200, 200)]
    assert deferred is not None
    for part in module.modules():
        deferred.fill([part])

    assert module.first.bank is module.second.bank
    assert module.first.bank[0].sum() == 200 * 200


class ShardedByHand(BuiltLate):
    """Shards its blocks itself, with the mesh of the strategy."""

    def configure_model(self) -> None:
        super().configure_model()
        if isinstance(self.trainer.strategy, ParalFSDPStrategy):
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])


def fit_late(model: type[Fitted], num_ranks: int, **options: Any) -> Any:
    return fit(model, NUM_BATCHES, num_ranks, gradient_clip_val=0.5, **options)


def fit_late_on_rank(threshold_bytes: int, **options: Any) -> Any:
    before, recorder.DEFERRED_BYTES = recorder.DEFERRED_BYTES, threshold_bytes
    try:
        return fit_late(BuiltLate, 2, strategy=ParalFSDPStrategy(**options))
    finally:
        recorder.DEFERRED_BYTES = before


@pytest.mark.parametrize("threshold_bytes", [16, 2000, 10**6])
def test_values_equal_one_process(on_ranks, threshold_bytes: int) -> None:
    assert_same_fit(on_ranks(2, fit_late_on_rank, threshold_bytes), fit_late(BuiltLate, 1))


def fit_sharded_by_hand(threshold_bytes: int) -> Any:
    kinds = []
    before, recorder.DEFERRED_BYTES = recorder.DEFERRED_BYTES, threshold_bytes

    class Seen(ShardedByHand):
        def on_train_start(self) -> None:
            kinds.append({type(parameter) for parameter in self.blocks.parameters()})

    try:
        _, weights = fit_late(Seen, 2, strategy="paral_fsdp")
    finally:
        recorder.DEFERRED_BYTES = before
    assert kinds == [{DTensor}]
    return {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()}


@pytest.mark.parametrize("threshold_bytes", [16, 10**6])
def test_modules_that_are_already_sharded_are_kept(on_ranks, threshold_bytes: int) -> None:
    _, expected = fit_late(BuiltLate, 1)

    for weights in on_ranks(2, fit_sharded_by_hand, threshold_bytes):
        for name, weight in weights.items():
            assert (weight - expected[name]).abs().max() <= 1e-5, name


UNIT_BYTES = 4 * 1024 * 1024
NUM_UNITS = 24


class Large(Fitted):
    def configure_model(self) -> None:
        reset_peak()
        self.before = resident_bytes("VmRSS")
        self.blocks = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(NUM_UNITS)))

    def on_validation_start(self) -> None:
        self.peak = resident_bytes("VmHWM") - self.before

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.total = float(sum(p.full_tensor().double().sum() for p in self.blocks.parameters()))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(field: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def peak_of_construction() -> tuple[int, float]:
    fit_late(BuiltLate, 2, strategy="paral_fsdp")  # load modules that are imported at first use before measuring
    ctypes.CDLL(None).mallopt(-3, 1024 * 1024)  # M_MMAP_THRESHOLD: freed memory is returned to the system
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1048576"  # so that the strategy does not set it
    torch.manual_seed(1)
    model = Large()
    trainer = quiet_trainer(devices=2, strategy="paral_fsdp", limit_val_batches=1)
    trainer.validate(model, token_loader(1, 2), verbose=False)
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    return model.peak, model.total


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_rank_holds_little_more_than_its_shards_and_one_unit(on_ranks) -> None:
    torch.manual_seed(1)
    expected = sum(nn.Linear(1024, 1024, bias=False).weight.double().sum().item() for _ in range(NUM_UNITS))

    for peak, total in on_ranks(2, peak_of_construction):
        assert peak <= NUM_UNITS * UNIT_BYTES / 2 + 5 * UNIT_BYTES
        assert total == pytest.approx(expected, rel=1e-9)
