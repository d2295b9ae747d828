"""Readers return full gradients, parameters and optimizer state in hooks, equal under every strategy."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ParalFSDPStrategy
from lightning_paral.model.full_tensors import gradient_norm
from tests.models.regression import GLOBAL_BATCH_SIZE, Regression, regression_data
from tests.running import quiet_trainer

NUM_BATCHES = 2


class Reads(Regression):
    """Records the results of the readers in each step, or in one process the values themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        weight = self.hidden.weight
        if hasattr(strategy, "gradient_norm"):
            gradients = [strategy.full_gradient(parameter) for parameter in self.parameters()]
            self.read += [strategy.gradient_norm(), *gradients, strategy.full_parameter(weight)]
            self.read.append(strategy.gradient_norm(torch.optim.SGD([weight], lr=0.1)))
            if self.global_step:
                self.read.append(strategy.full_optimizer_state(weight, "exp_avg"))
            else:
                with pytest.raises(ValueError, match="no state 'exp_avg'"):
                    strategy.full_optimizer_state(weight, "exp_avg")
        else:
            gradients = [parameter.grad.clone() for parameter in self.parameters()]
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            self.read += [norm, *gradients, weight.detach().clone(), weight.grad.norm()]
            if self.global_step:
                self.read.append(optimizer.state[weight]["exp_avg"].clone())


def read_in_fit(num_ranks: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(3)
    model = Reads()
    quiet_trainer(max_epochs=1, **options).fit(model, regression_data(NUM_BATCHES, num_ranks))
    assert all(type(each) is Tensor for each in model.read)
    return model.read


def read_on_rank(strategy: Any) -> list[Tensor]:
    return read_in_fit(2, devices=2, strategy=strategy)


@pytest.mark.parametrize("strategy", ["paral_ddp", ParalFSDPStrategy(units=[torch.nn.Linear])], ids=["ddp", "fsdp"])
def test_readers_equal_one_process(on_ranks, strategy: Any) -> None:
    expected = read_in_fit(1, devices=1)
    for read in on_ranks(2, read_on_rank, strategy):
        torch.testing.assert_close(read, expected)


def test_readers_of_dp_equal_one_device() -> None:
    assert GLOBAL_BATCH_SIZE % 2 == 0
    torch.testing.assert_close(read_in_fit(1, devices=2, strategy="paral_dp"), read_in_fit(1, devices=1))


def test_readers_return_copies() -> None:
    class Writes(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            strategy: Any = self.trainer.strategy
            for parameter in self.parameters():
                strategy.full_gradient(parameter).zero_()
                strategy.full_parameter(parameter).zero_()

    models = []
    for kind in (Regression, Writes):
        torch.manual_seed(3)
        models.append(kind())
        quiet_trainer(max_epochs=1, devices=2, strategy="paral_dp").fit(models[-1], regression_data(NUM_BATCHES, 1))
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


def test_norm_includes_gradients_of_every_kind() -> None:
    model = Regression()
    model.table = torch.nn.Embedding(4, 2, sparse=True)
    model.phase = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.cdouble))
    model.double()
    looked_up = model.table(torch.tensor([1, 1, 3])).square().sum()
    (looked_up + model.phase.abs().square().sum() + model(torch.ones(2, 8, dtype=torch.double)).sum()).backward()
    dense = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]
    expected = torch.cat([gradient.abs().flatten() for gradient in dense]).norm()
    torch.testing.assert_close(gradient_norm(model.parameters()), expected, rtol=1e-12, atol=0.0)
