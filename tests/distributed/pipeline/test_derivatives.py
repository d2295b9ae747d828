"""Gradients by the inputs, which would pass through other stages, are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ConfigurationError, ParalPipelineStrategy, RankFailedError
from lightning_paral.engines.pipeline.derivatives import THROUGH_STAGES
from tests.models.chain import FEATURES, Chain, fit_chain


class Derives(Chain):
    """Adds a term to the loss that depends on a gradient."""

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        x = inputs.clone().requires_grad_()
        outputs = self(x)
        loss = nn.functional.mse_loss(outputs, targets)
        return loss + 0.1 * self.of_loss(x, outputs, loss)


class ByInputs(Derives):
    """A gradient penalty. The inputs also reach the outputs past the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.tanh(self.skip(x))

    def of_loss(self, x: Tensor, outputs: Tensor, loss: Tensor) -> Tensor:
        (slopes,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return slopes.square().mean()


def refusal(make: Callable[[], Chain], check_steps: bool) -> str:
    strategy = ParalPipelineStrategy(split="global", micro_batches=1, check_steps=check_steps)
    with pytest.raises((ConfigurationError, RankFailedError)) as error:
        fit_chain(strategy, 2, module=make, num_batches=2, num_sanity_val_steps=0)
    return str(error.value)


@pytest.mark.parametrize("check_steps", [True, False])
@pytest.mark.parametrize("make", [ByInputs])
def test_gradients_that_would_pass_through_other_stages_are_refused(
    on_ranks: Any, rank_pool: Any, make: Any, check_steps: bool
) -> None:
    try:
        messages = on_ranks(2, refusal, make, check_steps)
    finally:
        rank_pool.renew_world()

    assert all(THROUGH_STAGES in message for message in messages), messages
