"""Models built in `configure_model` have the values that one process draws, and ranks hold few of them at once."""

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_paral import ParalFSDPStrategy
from lightning_paral.model.deferred import recorder
from tests.models.blocks import WIDTH, Block, next_token_loss
from tests.models.tokens import VOCABULARY, Fitted, fit, token_loader
from tests.running import assert_same_fit, quiet_trainer

NUM_BATCHES = 3


class BuiltLate(Fitted):
    """Sets initial values in all the ways that people use in `configure_model`."""

    def configure_model(self) -> None:
        if hasattr(self, "embedding"):
            return
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for rate, block in zip(torch.linspace(0, 1, 3), self.blocks, strict=True):
            block.rate = rate.item()
            nn.init.orthogonal_(block.up.weight)
            nn.init.trunc_normal_(block.down.weight, std=0.2)
            block.up.bias.data.fill_(0.1)
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(2.0)
            self.blocks[2].down.weight[1:3] = 0.5
            self.blocks[2].up.weight.copy_(self.blocks[1].up.weight * 0.5)
        self.blocks.apply(self.shift)
        scale = torch.ones(WIDTH)
        scale[::2] = torch.rand(WIDTH // 2)
        self.register_buffer("scale", scale, persistent=False)
        self.gain = nn.Parameter(torch.tensor(1.5))

    @staticmethod
    def shift(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.data.add_(0.05 * torch.rand(1).item())

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.embedding(batch[0])
        for block in self.blocks:
            x = block(x) * (1 + block.rate)
        return next_token_loss(self.gain * self.head(self.scale * x), batch[0])


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


class DefaultDtype(Fitted):
    """Creates tensors of the default dtype, and sets `.data` from deferred to materialized tensors and back."""

    def configure_model(self) -> None:
        self.position = nn.Parameter(torch.randn(1, VOCABULARY, WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())
        self.register_buffer("steps", torch.arange(WIDTH) / WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first.weight.data = torch.tensor([[0.25] * WIDTH] * WIDTH)
        self.tied = nn.Parameter(torch.tensor([[0.5] * WIDTH] * WIDTH))
        self.tied.data = self.second.weight.data
        with torch.no_grad():
            self.second.weight.mul_(2.0)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
        self.values = [value.clone() for value in (*whole, *self.buffers())]


def values_of_default_dtype(strategy: str, num_ranks: int, precision: Any, threshold_bytes: int) -> list[Tensor]:
    before, recorder.DEFERRED_BYTES = recorder.DEFERRED_BYTES, threshold_bytes
    try:
        torch.manual_seed(1)
        model = DefaultDtype()
        trainer = quiet_trainer(strategy=strategy, devices=num_ranks, precision=precision, limit_val_batches=1)
        trainer.validate(model, token_loader(1, num_ranks), verbose=False)
    finally:
        recorder.DEFERRED_BYTES = before
    return model.values


@pytest.mark.parametrize("threshold_bytes", [16, 10**6])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_dtype_is_the_default_dtype_at_construction(on_ranks, precision: str, threshold_bytes: int) -> None:
    expected = values_of_default_dtype("auto", 1, precision, threshold_bytes)
    for values in on_ranks(2, values_of_default_dtype, "paral_fsdp", 2, precision, threshold_bytes):
        for value, one in zip(values, expected, strict=True):
            assert value.dtype == one.dtype
            assert torch.equal(value, one)
