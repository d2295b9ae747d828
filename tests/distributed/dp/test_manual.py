"""Manual optimization under `ParalDPStrategy`: optimizer calls run once for all replicas."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from lightning_paral import ConfigurationError
from tests.distributed.dp.test_dp import Scores, assert_same_weights, dp_trainer, fitted, one_process_and_dp, samples
from tests.models.regression import FEATURES


class Manual(Scores):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class GAN(LightningModule):
    """A GAN with two optimizers, each with a scheduler, that steps the generator and then the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real, noise = batch[0], batch[0].roll(1, dims=1).sin()
        for_generator, for_discriminator = self.optimizers()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

        self.toggle_optimizer(for_generator)
        assert not any(parameter.requires_grad for parameter in self.discriminator.parameters())
        loss = cross_entropy(self.discriminator(self.generator(noise)), ones)
        for_generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(for_generator, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.log("generator_loss", loss)

        with for_discriminator.toggle_model():
            fake = self.generator(noise).detach()
            losses = cross_entropy(self.discriminator(real), ones), cross_entropy(self.discriminator(fake), zeros)
            for_discriminator.zero_grad()
            for loss in losses:  # gradients are accumulated
                self.manual_backward(loss)
            for_discriminator.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("discriminator_loss", sum(losses).item())

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.SGD(self.discriminator.parameters(), lr=1e-1, momentum=0.5),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


def test_gan_trains_as_in_one_process() -> None:
    def run(trainer: Any, module: GAN) -> Any:
        weights = fitted(trainer, module)
        rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
        return weights, rates, trainer.callback_metrics, trainer.global_step

    (expected, rates, metrics, num_steps), (weights, dp_rates, dp_metrics, dp_num_steps) = one_process_and_dp(GAN, run)

    assert_same_weights(weights, expected)
    assert dp_rates == rates
    assert dp_num_steps == num_steps == 20  # 2 epochs of 5 batches, 2 optimizers
    for name, value in metrics.items():
        torch.testing.assert_close(dp_metrics[name], value, rtol=1e-4, atol=1e-5)


class WithClosure(Manual):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = Scores.training_step(self, batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Accumulating(Manual):
    """Steps after every second batch, clips with torch's function, and reads the gradients."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return loss


class HooksOptimize(Manual):
    """Uses the optimizer in a hook that runs inside `manual_backward`."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))

    def on_after_backward(self) -> None:
        self.optimizers().step()


@pytest.mark.parametrize("make", [WithClosure, Accumulating, HooksOptimize])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_manual_optimization_equals_one_process(make: Any) -> None:
    expected, weights = one_process_and_dp(make, fitted)

    assert_same_weights(weights, expected)


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


def test_lbfgs_under_automatic_optimization_equals_one_process() -> None:
    class LBFGS(Scores):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    expected, weights = one_process_and_dp(LBFGS, fitted)

    assert_same_weights(weights, expected, tolerance=1e-4)
