"""Backward passes and steps that user code runs without the strategy are correct, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral.errors import ConfigurationError
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Beside(Regression):
    """Calls `act(module, batch)` in one place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.automatic_optimization = not place.startswith("manual")
        self.batch: Any = None

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch = batch
        loss = self.loss(batch)
        if not self.automatic_optimization:
            MANUAL[self.place](self, loss)
        self.losses.append(loss.item())
        return loss

    def on_after_backward(self) -> None:
        if self.place == "on_after_backward":
            self.loss(self.batch).backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.place == "on_before_optimizer_step":
            self.loss(self.batch).backward()

    def on_train_batch_end(self, *args: Any) -> None:
        if self.place == "own optimizer":
            own = torch.optim.SGD(self.parameters(), lr=0.1)
            own.zero_grad()
            self.loss(self.batch).backward()
            own.step()
        if self.place == "saliency in a hook":
            self.loss(self.batch).backward()
            self.zero_grad()


def raw_backward(module: Beside, loss: Tensor) -> None:
    optimizer: Any = module.optimizers(use_pl_optimizer=False)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def inner_optimizer(module: Beside, loss: Tensor) -> None:
    optimizer: Any = module.optimizers()
    optimizer.zero_grad()
    loss.backward()
    optimizer.optimizer.step()


def announced(module: Beside, loss: Tensor) -> None:
    optimizer: Any = module.optimizers(use_pl_optimizer=False)
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()


def saliency(module: Beside, loss: Tensor) -> None:
    optimizer: Any = module.optimizers()
    module.loss(module.batch).backward()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()


def of_trainer(module: Beside, loss: Tensor) -> None:
    optimizer: Any = module.trainer.optimizers[0]
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()


MANUAL: dict[str, Callable[[Beside, Tensor], None]] = {
    f"manual {act.__name__}": act for act in (raw_backward, inner_optimizer, announced, saliency, of_trainer)
}
WRONG = ["manual raw_backward", "manual inner_optimizer", "on_after_backward", "on_before_optimizer_step"]
RIGHT = ["manual announced", "manual saliency", "manual of_trainer", "saliency in a hook"]


def fit(place: str, strategy: str, num_ranks: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    module = Beside(place)
    num_devices = 2 if strategy == "paral_dp" else num_ranks
    trainer = quiet_trainer(
        max_epochs=1, devices=num_devices, strategy=strategy
    )  # max_steps would not count the user's steps
    trainer.fit(module, regression_data(3, num_ranks))
    return {name: value.clone() for name, value in module.state_dict().items()}


def refusal(place: str, strategy: str) -> str:
    try:
        fit(place, strategy)
    except ConfigurationError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("place", [*WRONG, "own optimizer"])
def test_gradients_that_no_rank_averages_are_refused(on_ranks, place: str) -> None:
    for said in on_ranks(2, refusal, place, "paral_ddp"):
        assert "loss.backward()" in said
        assert "did not average" in said


@pytest.mark.parametrize("place", RIGHT)
def test_averaged_or_zeroed_gradients_train(on_ranks, place: str) -> None:
    expected = fit(place, "auto", 1)
    for weights in on_ranks(2, fit, place, "paral_ddp"):
        torch.testing.assert_close(weights, expected)


def test_single_replica_does_not_step_an_optimizer() -> None:
    with pytest.raises(ConfigurationError, match="stepped an optimizer on its own"):
        fit("manual of_trainer", "paral_dp", 1)
