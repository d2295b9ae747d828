"""Precision: what is gathered in 16 bits, what computes in fp32, and how the scaler unscales shards."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader

from lightning_paral import ParalFSDPStrategy
from lightning_paral.distributed.mesh import ParallelDims, make_mesh
from lightning_paral.engines.fsdp.gradients import ShardedScaler, sharded_precision
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Normalizing(LightningModule):
    """Normalizes fp32 and bf16 inputs by statistics of the sample and by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.InstanceNorm1d(4, affine=True)
        self.widen = nn.Conv1d(4, 6, 1)
        self.tracking = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
        self.last = nn.Linear(6 * 8, 2)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.tracking(self.widen(self.first(batch))))
        loss = (self.last(hidden.flatten(1)).float() - batch.mean(dim=(1, 2), keepdim=True)[:, 0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_normalizing(strategy: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Normalizing()
    data = torch.randn(16, 4, 8, generator=torch.Generator().manual_seed(1)) * 3 + 1
    trainer = quiet_trainer(strategy=strategy, devices=1, max_epochs=1, precision="bf16-mixed")
    trainer.fit(model, DataLoader(data, 4))
    return model.losses, model.state_dict()


def fit_sharded(units: Any) -> tuple[list[float], dict[str, Tensor]]:
    return fit_normalizing(ParalFSDPStrategy(units=units))


@pytest.mark.parametrize("units", ["auto", ["InstanceNorm1d", "Conv1d"]])
def test_instance_norm_under_mixed_precision_computes_as_in_one_process(on_ranks, units: Any) -> None:
    losses, weights = fit_normalizing("auto")

    ((found, state),) = on_ranks(1, fit_sharded, units)

    torch.testing.assert_close(found, losses, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(state, weights, rtol=1e-6, atol=1e-7)


class OfSeveralDtypes(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([1001, 3, 70001]), requires_grad=False)
        self.wave = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j, 0.5j]), requires_grad=False)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.table.detach().clone(), self.wave.detach().clone()))
        return super().training_step(batch, batch_idx)


def seen_in_steps() -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    module = OfSeveralDtypes()
    trainer = quiet_trainer(strategy="paral_fsdp", devices=2, max_steps=2, precision="bf16-mixed")
    trainer.fit(module, regression_data(2, 2))
    return module.seen, module.table


def test_integers_and_complex_numbers_keep_their_dtype(on_ranks) -> None:
    expected = OfSeveralDtypes()
    for seen, after in on_ranks(2, seen_in_steps):
        assert len(seen) == 2
        for table, wave in seen:
            assert torch.equal(table, expected.table)
            assert torch.equal(wave, expected.wave)
        assert torch.equal(after, expected.table)


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sharded_parameters() -> list[nn.Parameter]:
    """Return parameters with gradients, the first two sharded."""
    dims = ParallelDims(rank=dist.get_rank(), shard=dist.get_world_size())
    mesh = make_mesh(torch.device("cpu"), dims)
    parameters = []
    for gradient in (values(1, 5, 3), values(2, 4), values(3)):
        made = distribute_tensor(gradient, mesh, [Shard(0)]) if gradient.dim() else gradient
        parameter = nn.Parameter(torch.zeros_like(made))
        parameter.grad = made
        parameters.append(parameter)
    return parameters


def step_with_scaler(poisoned_rank: int | None) -> list[Tensor]:
    parameters = sharded_parameters()
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = ShardedScaler(device="cpu", init_scale=8.0)
    scaler.scale(torch.zeros(1))
    if dist.get_rank() == poisoned_rank:
        parameters[0].grad.to_local()[0, 0] = torch.inf
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (8.0 if poisoned_rank is None else 4.0)
    return [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in parameters]


def test_scale_that_the_user_chose_is_kept() -> None:
    chosen = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    sharded: Any = sharded_precision(MixedPrecision("16-mixed", "cpu", chosen))

    assert isinstance(sharded.scaler, ShardedScaler)
    assert sharded.scaler.state_dict() == chosen.state_dict()


def test_scaler_unscales_shards_and_all_ranks_skip_together(on_ranks) -> None:
    expected = [-values(1, 5, 3) / 8, -values(2, 4) / 8, -values(3) / 8]

    for stepped in on_ranks(2, step_with_scaler, None):
        torch.testing.assert_close(stepped, expected)
    for skipped in on_ranks(2, step_with_scaler, 1):
        assert all(not parameter.any() for parameter in skipped)
