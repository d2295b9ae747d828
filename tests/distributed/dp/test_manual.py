"""Manual optimization under `ParalDPStrategy`: optimizer calls run once for all replicas."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ConfigurationError
from tests.distributed.dp.test_dp import Scores, dp_trainer, samples


class Manual(Scores):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithClosure(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = Scores.training_step(self, batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class DivergesOrEnds(Manual):
    """Only the first replica, or only the others, run the backward pass; unless `ends`, all clear the gradients."""

    def __init__(self, ends: bool, first: bool) -> None:
        super().__init__()
        self.ends, self.first = ends, first

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        is_first = bool(batch[0][0, 0] == samples().dataset[0][0][0])
        if is_first == self.first:
            self.manual_backward(super().training_step(batch, batch_idx))
        if not self.ends:
            self.optimizers().zero_grad()


class FailsInOne(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch[0][0, 0] == samples().dataset[1][0][0]:
            raise ZeroDivisionError("the reason")
        self.manual_backward(super().training_step(batch, batch_idx))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: DivergesOrEnds(ends=False, first=False),
            ConfigurationError,
            r"replica 0 was at optimizer 0\.zero_grad, replica 1 was at self\.manual_backward.*paral_ddp",
        ),
        (
            lambda: DivergesOrEnds(ends=True, first=True),
            ConfigurationError,
            r"replica 0 was at self\.manual_backward, replica 1 was at the end",
        ),
        (FailsInOne, ZeroDivisionError, "the reason"),
    ],
)
def test_replicas_that_differ_or_fail_do_not_deadlock(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        dp_trainer().fit(make(), samples())


def test_lbfgs_under_manual_optimization_is_refused() -> None:
    class LBFGS(WithClosure):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigurationError, match=r"LBFGS.*automatic optimization, or paral_ddp"):
        dp_trainer().fit(LBFGS(), samples())
