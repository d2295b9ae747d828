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


def test_diverging_replicas_raise() -> None:
    class Divergent(Manual):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if batch[0][0, 0] != samples().dataset[0][0][0]:
                self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().zero_grad()

    with pytest.raises(
        ConfigurationError,
        match=r"replica 0 was at optimizer 0\.zero_grad, replica 1 was at self\.manual_backward.*paral_ddp",
    ):
        dp_trainer().fit(Divergent(), samples())


def test_replica_that_ends_early_does_not_deadlock_the_others() -> None:
    class Early(Manual):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if batch[0][0, 0] == samples().dataset[0][0][0]:
                self.manual_backward(super().training_step(batch, batch_idx))

    with pytest.raises(ConfigurationError, match=r"replica 0 was at self\.manual_backward, replica 1 was at the end"):
        dp_trainer().fit(Early(), samples())


def test_error_of_one_replica_releases_those_that_wait() -> None:
    class Failing(Manual):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if batch[0][0, 0] == samples().dataset[1][0][0]:
                raise ZeroDivisionError("the reason")
            self.manual_backward(super().training_step(batch, batch_idx))

    with pytest.raises(ZeroDivisionError, match="the reason"):
        dp_trainer().fit(Failing(), samples())


def test_lbfgs_under_manual_optimization_is_refused() -> None:
    class LBFGS(WithClosure):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigurationError, match=r"LBFGS.*automatic optimization, or paral_ddp"):
        dp_trainer().fit(LBFGS(), samples())
