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
