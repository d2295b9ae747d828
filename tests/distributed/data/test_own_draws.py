"""Data ranks draw their own random numbers where they read samples and, with `split="batch"`, in steps."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_paral import ParalDDPStrategy
from tests.models.linear import Linear
from tests.running import SaveAt, quiet_trainer

NUM_SAMPLES = 16


def draw() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


class Augmented(Dataset[Tensor]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, *draw()], dtype=torch.double)


class Noisy(Linear):
    """Draws in the dataset, in steps, in hooks, and in the optimizer."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__(1)
        self.automatic_optimization = not manual
        self.read, self.in_steps, self.outside = [], [], []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.read += batch.tolist()
        self.in_steps.append(draw())
        loss = self.layer(batch[:, :1].float() / NUM_SAMPLES).mean()
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.in_steps.append(draw())
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.read += batch.tolist()
            self.in_steps.append(draw())

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        if not self.trainer.sanity_checking:
            self.in_steps.append(draw())
        return batch

    def on_train_batch_start(self, *args: Any) -> None:
        self.outside.append(draw())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return NoisySGD(self.parameters(), lr=0.01)


class NoisySGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter += 0.01 * torch.randn_like(parameter)
        return loss


def fit(split: str, workers: bool, num_workers: int, manual: bool = False, resumes: bool = False, **more: Any) -> Any:
    seed_everything(99 if resumes else 1, workers=workers)
    module, ckpt_path, save_at = Noisy(manual), more.pop("ckpt_path", None), more.pop("save_at", None)
    batch_size = 2 if split == "batch" else 4
    loaders = [DataLoader(Augmented(), batch_size, num_workers=num_workers, shuffle=not each) for each in range(2)]
    more["callbacks"] = [SaveAt(*save_at)] if save_at else []
    trainer = quiet_trainer(strategy=ParalDDPStrategy(split=split), devices=2, max_epochs=2, **more)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return module.read, module.in_steps, module.outside, [each.tolist() for each in module.parameters()]


@pytest.mark.parametrize("split", ["batch", "global"])
@pytest.mark.parametrize(("workers", "num_workers"), [(False, 0), (False, 2), (True, 2)])
@pytest.mark.parametrize("manual", [False, True])
def test_draws_of_a_rank_differ_and_others_are_equal(
    on_ranks, split: str, workers: bool, num_workers: int, manual: bool
) -> None:
    (read, in_steps, outside, weights), other = on_ranks(2, fit, split, workers, num_workers, manual)

    assert outside == other[2]
    assert weights == other[3]
    for generator in range(3):
        drawn = [row[generator + 1] for row in read + other[0]]
        assert len(drawn) == 4 * NUM_SAMPLES
        assert len(set(drawn)) == len(drawn)
        drawn = [row[generator] for row in in_steps + (other[1] if split == "batch" else [])]
        assert len(set(drawn)) == len(drawn)
    assert split == "batch" or in_steps == other[1]
    assert len({tuple(row) for row in outside}) == len(outside)


@pytest.mark.parametrize("split", ["batch", "global"])
def test_a_resumed_run_draws_the_same_numbers(on_ranks, tmp_path, split: str) -> None:
    path = str(tmp_path / "x.ckpt")
    whole = on_ranks(2, partial(fit, split, False, 0, save_at=(6, path)))
    resumed = on_ranks(2, partial(fit, split, False, 0, resumes=True, ckpt_path=path))

    for ours, expected in zip(resumed, whole, strict=True):
        for found, all_drawn in zip(ours[:3], expected[:3], strict=True):
            assert found == all_drawn[-len(found) :]
        assert ours[3] == expected[3]
