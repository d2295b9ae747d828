"""At stage 3, weights are not kept in memory between forward and backward, and numbers stay those of DDP."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_paral import ConfigurationError, ParalZeROStrategy
from tests.running import assert_same_fit, quiet_trainer

WIDTH = 64
PARTITIONED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def strategy() -> ParalZeROStrategy:
    return ParalZeROStrategy(stage=3, deepspeed_config=PARTITIONED)


class Wide(LightningModule):
    """Uses weights in several ways: in layers, twice, transposed, and in a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Bilinear(WIDTH, WIDTH, 8)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(8, 1)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(x)))
        hidden = self.first(hidden)
        return self.out(self.second(hidden, x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = functional.softplus(self(batch)).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    drawn = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(5))
    return DataLoader(drawn, batch_size=4)  # type: ignore[arg-type]


def fit(name: str, num_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    module = Wide()
    made: Any = strategy() if name == "zero3" else name
    quiet_trainer(max_epochs=1, devices=num_ranks, strategy=made).fit(module, loader())
    return module.losses, {key: value.detach().clone() for key, value in module.state_dict().items()}


def test_weights_that_are_saved_as_views_give_the_gradients_of_ddp(
    on_ranks: Callable[..., list[Any]],
) -> None:
    for expected, found in zip(on_ranks(2, fit, "paral_ddp", 2), on_ranks(2, fit, "zero3", 2), strict=True):
        assert_same_fit([found], expected, 1e-6)


class OtherLinear(Wide):
    """Calls `linear` with tensors that are no parameters of the run, and with a parameter that it finds by itself."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        weight = torch.full((3, WIDTH), 1 + 2j, requires_grad=True)
        functional.linear(batch.to(weight.dtype), weight).abs().sum().backward()
        self.losses.append(float(weight.grad.imag.sum()))
        _, tangent = torch.func.jvp(lambda x: functional.linear(x, torch.ones(3, WIDTH)), (batch,), (batch,))
        (last, bias) = self.out.parameters()
        hidden = functional.linear(self.second(batch, batch), last, bias)
        self.losses.append(float(tangent.sum()))
        with torch.autocast("cpu", torch.bfloat16):
            self.losses.append(float(self.first(batch[None]).sum()))
        return super().training_step(batch, batch_idx) + hidden.mean()


def fit_other(name: str) -> list[float]:
    plain, module = functional.linear, OtherLinear()
    made: Any = strategy() if name == "zero3" else name
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=made)
    trainer.fit(module, loader())
    assert functional.linear is plain
    losses = list(module.losses)
    module.training_step = lambda *_: int("mine")  # type: ignore[method-assign, assignment]
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=strategy() if name == "zero3" else name)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(module, loader())
    assert functional.linear is plain
    return losses


def test_linear_stays_torchs_for_other_weights_and_after_failures(on_ranks: Callable[..., list[Any]]) -> None:
    for expected, found in zip(on_ranks(2, fit_other, "paral_ddp"), on_ranks(2, fit_other, "zero3"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


class StepsTooEarly(Wide):
    """Changes the weights between the forward pass and its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.kept: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        old, new = self.kept, self(batch).mean()
        self.kept = self(batch).square().mean() if batch_idx == 0 else None
        optimizer.zero_grad()
        self.manual_backward(new if old is None else old)
        optimizer.step()


def fit_too_early(name: str) -> str:
    try:
        made: Any = strategy() if name == "zero3" else name
        quiet_trainer(max_epochs=1, devices=2, strategy=made).fit(StepsTooEarly(), loader())
    except (ConfigurationError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_step_before_the_backward_pass_is_an_error_as_in_one_process(on_ranks: Callable[..., list[Any]]) -> None:
    for name in ("paral_ddp", "paral_zero1", "paral_zero2", "zero3"):
        for message in on_ranks(2, fit_too_early, name):
            assert "modified by an inplace operation" in message, name
