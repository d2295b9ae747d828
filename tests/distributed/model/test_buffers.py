"""All ranks use rank 0's buffers under every strategy, as under DDP."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paral.comm.broadcast import broadcast
from tests.contract.cases import MAIN, labels, strategy_of, with_ranks
from tests.running import quiet_trainer

STRATEGIES = (*labels(with_ranks(MAIN, 2)), "paral_ddp_ring")


class Normalized(LightningModule):
    """Has BatchNorm, a counter, an average that it assigns, and a queue that it changes through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(2, 4).t())
        self.register_buffer("flag", torch.tensor(False))
        self.in_training: list[list[float]] = []
        self.in_validation: list[list[float]] = []

    def values(self) -> list[float]:
        return [float(buffer.double().sum()) for buffer in self.buffers()]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.in_training.append(self.values())
        self.seen += int(batch.sum() * 1000)
        self.average = 0.9 * self.average + 0.1 * batch.mean(dim=0)
        self.queue.data[:, 0] = batch[0]
        self.flag = batch.sum() > 0
        return ((self.net(batch) - batch - self.average) ** 2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.in_validation.append(self.values())
        self.log("loss", ((self.net(batch) - batch) ** 2).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def rows(num: int, seed: int, rank: int) -> DataLoader[Tensor]:
    data = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.2, 3, num)[:, None]
    return DataLoader(data[rank::2], batch_size=4)


def fit(strategy: str, of_strategy: Any = None, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Normalized()
    defaults = {"max_epochs": 2, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    trainer = quiet_trainer(strategy=strategy_of(strategy, **(of_strategy or {})), devices=2, **(defaults | options))
    trainer.fit(model, rows(48, 1, trainer.global_rank), rows(16, 2, trainer.global_rank))
    return {
        "training": model.in_training,
        "validation": model.in_validation,
        "after": model.values(),
        "loss": float(trainer.callback_metrics["loss"]),
    }


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_equal_those_under_ddp(on_ranks, strategy: str, accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    expected = on_ranks(2, partial(fit, "ddp", **options))

    for rank, found in enumerate(on_ranks(2, partial(fit, strategy, **options))):
        assert found["loss"] == pytest.approx(expected[0]["loss"], rel=1e-5)
        for stage in ("training", "validation"):
            assert torch.tensor(found[stage]).sub(torch.tensor(expected[rank][stage])).abs().max() < 1e-4
        assert found["validation"][-1] == found["after"]


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero1"])
def test_ranks_keep_their_own_buffers_on_request(on_ranks, strategy: str) -> None:
    first, second = on_ranks(2, partial(fit, strategy, of_strategy={"broadcast_buffers": False}))

    assert first["after"] != second["after"]


class Unseeded(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("noise", torch.randn(3))
        self.seen: list[float] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen = [float(self.layer(torch.ones(4)).sum()), float(self.noise.sum())]


def validate_unseeded(label: str) -> list[float]:
    trainer = quiet_trainer(strategy=strategy_of(label), devices=2)
    torch.manual_seed(trainer.global_rank)
    model = Unseeded()
    trainer.validate(model, DataLoader(torch.randn(8, 4), batch_size=4), verbose=False)
    return model.seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_evaluate_rank_zeros_model(on_ranks, strategy: str) -> None:
    first, second = on_ranks(2, validate_unseeded, strategy)

    assert first == second


def broadcast_various() -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    real = torch.randn(600, 700, generator=generator)
    tensors = [
        real.clone(),
        real[:5, :3].t(),
        real[0, 0].clone(),
        real[:3].bool(),
        torch.complex(real[0], real[1]),
        real[:7, 0].to(torch.bfloat16),
        torch.empty(0),
        (real[:9, 0] * 100).to(torch.int64),
        torch.randn(700, 600, generator=generator).t(),
    ]
    versions = [tensor._version for tensor in tensors]
    broadcast(tensors)
    assert versions == [tensor._version for tensor in tensors]
    return [tensor.clone() for tensor in tensors]


def test_broadcast_gives_all_ranks_the_bytes_of_rank_zero(on_ranks) -> None:
    for first, second in zip(*on_ranks(2, broadcast_various), strict=True):
        assert torch.equal(first, second)
    assert len(on_ranks(2, broadcast_various)[0]) == 9
