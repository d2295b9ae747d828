"""Overlapped gradient reduction gives the same gradients as reduction after the backward pass, for all windows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ParalZeROStrategy
from tests.models.regression import FEATURES, Regression, fit
from tests.running import assert_same_fit


class UsedEarly(Regression):
    """Has windows of two backward passes, the last of which does not use `spare`."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(FEATURES, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        outputs = self(inputs) if batch_idx % 2 else self(inputs) + self.spare(inputs)
        loss = nn.functional.mse_loss(outputs, targets)
        self.losses.append(loss.item())
        return loss


class Automatic(UsedEarly):
    """Tells in advance which backward pass is the last of a window."""


class Manual(UsedEarly):
    """Shows only by its step that a backward pass was the last of a window."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(0.5 * super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Clipped(Manual):
    """Clips gradients, which reads them before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


class Several(Manual):
    """Has two optimizers, the second of which steps half as often, after twice as many backward passes."""

    def configure_optimizers(self) -> Any:
        whole = [*self.hidden.parameters(), *self.out.parameters()]
        return [torch.optim.AdamW(whole, lr=1e-2), torch.optim.SGD(self.spare.parameters(), lr=0.1, momentum=0.9)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        self.manual_backward(UsedEarly.training_step(self, batch, batch_idx))
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            second.step()
            second.zero_grad()


KINDS = (Automatic, Manual, Clipped, Several)


def fit_all(num_ranks: int, accelerator: str, **options: Any) -> list[Any]:
    fits = []
    for kind in KINDS:
        strategy: Any = ParalZeROStrategy(**options) if options else "auto"
        windows = {"accumulate_grad_batches": 2} if kind().automatic_optimization else {}
        fits.append(fit(kind, 8, num_ranks, strategy=strategy, accelerator=accelerator, **windows))
    return fits


def fit_all_on_rank(stage: int, overlap: bool) -> list[Any]:
    # Several buckets, so that some are reduced while others fill.
    return fit_all(2, "cpu", stage=stage, overlap_comm=overlap, reduce_bucket_numel=200)


@pytest.fixture(scope="module")
def one_process() -> list[Any]:
    return fit_all(1, "cpu")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_every_kind_of_window_equals_one_process(on_ranks, one_process: list[Any], stage: int, overlap: bool) -> None:
    ranks = on_ranks(2, fit_all_on_rank, stage, overlap)
    for expected, *fits in zip(one_process, *ranks, strict=True):
        assert_same_fit(fits, expected)
