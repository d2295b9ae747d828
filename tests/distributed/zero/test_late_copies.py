"""Copies of gradients to host memory end before anything reads them.

On CUDA the copies are asynchronous. Here each is delayed until something waits for it.
"""

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from tests.models.regression import Regression, regression_data
from tests.running import assert_same_fit, quiet_trainer

CLIP_NORM = 0.01


class LateCopy:
    """The part of a CUDA event's interface that copies use."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target = target
        self.source = source.clone()

    def synchronize(self) -> None:
        self.target.copy_(self.source)


def copy_late(optimizer: Any, parameter: Tensor) -> None:
    """Like `async_inplace_copy_grad_to_fp32_buffer_from_gpu` of 0.19.8, with a copy that ends only on a wait."""
    group, source_offset, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
    target = optimizer.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, offset, numel)
    source = optimizer.get_param_gradient_attribute(parameter).view(-1).narrow(0, source_offset, numel)
    optimizer._pending_offload_events[object()] = LateCopy(target, source)
    optimizer.clear_grad_attribute(parameter)


class Reading(Regression):
    """Reads a gradient and clips in every step."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.read: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.read.append(gradient_of(self.trainer, self.out.weight))
        self.clip_gradients(optimizer, gradient_clip_val=CLIP_NORM, gradient_clip_algorithm="norm")


def gradient_of(trainer: Any, parameter: Any) -> Tensor:
    strategy = trainer.strategy
    gradient = strategy.full_gradient(parameter) if hasattr(strategy, "full_gradient") else parameter.grad
    return gradient.clone()


def fit(num_ranks: int, strategy: str, by_hand: bool) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(3)
    model = Reading(by_hand)
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy, accelerator="cpu")
    trainer.fit(model, regression_data(4, num_ranks))
    return (model.losses, {name: weight.clone() for name, weight in model.state_dict().items()}), model.read


def fit_with_late_copies(strategy: str) -> list[Any]:
    name = "async_inplace_copy_grad_to_fp32_buffer_from_gpu"
    plain = getattr(DeepSpeedZeroOptimizer, name)
    setattr(DeepSpeedZeroOptimizer, name, copy_late)
    try:
        return [fit(2, strategy, by_hand) for by_hand in (False, True)]
    finally:
        setattr(DeepSpeedZeroOptimizer, name, plain)


@pytest.mark.parametrize("strategy", ["paral_zero1_offload", "paral_zero2_offload"])
def test_clipping_and_reading_wait_for_copies(on_ranks, strategy: str) -> None:
    ranks = on_ranks(2, fit_with_late_copies, strategy)
    for by_hand, *fits in zip((False, True), *ranks, strict=True):
        expected, read = fit(1, "auto", by_hand)
        assert_same_fit([each for each, _ in fits], expected)
        for _, gradients in fits:
            torch.testing.assert_close(gradients, read, rtol=1e-4, atol=1e-6)
