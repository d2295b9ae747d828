"""Under ZeRO, gradients that come in another order, on some ranks or in later steps, are compared or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ParalZeROStrategy
from lightning_paral.errors import UnusedParametersError
from tests.models.regression import FEATURES, Regression, fit, regression_data
from tests.running import quiet_trainer


class Diverging(Regression):
    """Has two layers, which each rank uses in a different order, or of which each rank uses one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        layers = [self.first, self.second] if torch.distributed.get_rank() == 0 else [self.second, self.first]
        for layer in layers if self.how == "order" else layers[:1]:
            inputs = layer(inputs)
        return super().training_step([inputs, targets], batch_idx)


def refusals_of_divergence(find_unused: bool) -> list[str]:
    said = []
    for how, stage, overlap in DIVERGENCES:
        strategy = ParalZeROStrategy(stage=stage, overlap_comm=overlap, find_unused_parameters=find_unused)
        try:
            quiet_trainer(max_epochs=1, devices=2, strategy=strategy).fit(Diverging(how), regression_data(2, 2))
            said.append("")
        except UnusedParametersError as error:
            said.append(str(error))
    return said


ONLY_SOME = "Only some ranks got gradients for first.weight, first.bias, second.weight, second.bias"
DIVERGENCES = {
    ("order", 1, False): "",  # gradients are reduced after the backward pass, in the order of parameters
    ("order", 1, True): "in a different order on some ranks",
    ("order", 2, None): "in a different order on some ranks",
    ("use", 1, False): ONLY_SOME,
    ("use", 1, True): ONLY_SOME,
    ("use", 2, None): ONLY_SOME,
}


@pytest.mark.parametrize("find_unused", [False, True])
def test_ranks_are_refused_if_their_gradients_would_be_mixed_up(on_ranks, find_unused: bool) -> None:
    for messages in on_ranks(2, refusals_of_divergence, find_unused):
        for message, expected in zip(messages, DIVERGENCES.values(), strict=True):
            assert expected in message
            assert bool(message) == bool(expected)


class Reordering(Diverging):
    """Has two layers whose order changes after the first step, on all ranks equally."""

    def __init__(self) -> None:
        super().__init__("order")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        for layer in [self.second, self.first] if batch_idx else [self.first, self.second]:
            inputs = layer(inputs)
        return Regression.training_step(self, [inputs, targets], batch_idx)


def fits_that_reorder() -> list[Any]:
    results: list[Any] = []
    for stage, overlap, find_unused in REORDERED:
        strategy = ParalZeROStrategy(stage=stage, overlap_comm=overlap, find_unused_parameters=find_unused)
        try:
            results.append(fit(Reordering, 4, 2, strategy=strategy)[1])
        except UnusedParametersError as error:
            results.append(str(error))
    return results


REORDERED = {
    (1, False, False): "",
    (1, True, False): "in a different order than in an earlier step",
    (2, None, False): "in a different order than in an earlier step",
    (2, None, True): "",
    (3, None, False): "in a different order than in an earlier step",
    (3, None, True): "",
}


def test_order_that_changes_later_is_refused_unless_ranks_compare_it(on_ranks) -> None:
    expected = fit(Reordering, 4, 1)[1]
    for results in on_ranks(2, fits_that_reorder):
        for result, message in zip(results, REORDERED.values(), strict=True):
            if message:
                assert message in result
            else:
                for name, weight in expected.items():
                    torch.testing.assert_close(result[name], weight)


class PenalizedLater(Regression):
    """Has a penalty with its own backward pass in later steps, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx:
            self.manual_backward(0.01 * sum(p.square().sum() for p in self.parameters()))
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class SwappedTasks(Regression):
    """Alternates two tasks in windows of two batches, and swaps their order in the second window."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 1)
        self.second = nn.Linear(FEATURES, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        task = self.first if batch_idx in (0, 3) else self.second
        return super().training_step(batch, batch_idx) + task(batch[0]).square().mean()


def fits_with_other_passes(kind: type[Regression], window: int) -> list[Any]:
    results: list[Any] = []
    for stage, find_unused in ((2, False), (3, False), (2, True)):
        strategy = ParalZeROStrategy(stage=stage, find_unused_parameters=find_unused)
        try:
            results.append(fit(kind, 4, 2, strategy=strategy, accumulate_grad_batches=window)[1])
        except UnusedParametersError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize(("kind", "window", "is_refused"), [(PenalizedLater, 1, False), (SwappedTasks, 2, True)])
def test_ranks_compare_new_passes_and_refuse_differing_ones(
    on_ranks, kind: type[Regression], window: int, is_refused: bool
) -> None:
    expected = fit(kind, 4, 1, accumulate_grad_batches=window)[1]
    for results in on_ranks(2, fits_with_other_passes, kind, window):
        for result, find_unused in zip(results, (False, False, True), strict=True):
            if is_refused and not find_unused:
                assert "in a different order than in an earlier step" in result
            else:
                for name, weight in expected.items():
                    torch.testing.assert_close(result[name], weight)
