"""Under ZeRO, parameters that a step does not use do not change, as in one process, or the step is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ParalZeROStrategy
from lightning_paral.errors import ConfigurationError, UnusedParametersError
from tests.models.regression import FEATURES, Regression, regression_data
from tests.running import assert_same_fit, quiet_trainer

STAGES = (1, 2, 3)


class Alternating(Regression):
    """Has a further layer, which is used in the steps that `uses` selects."""

    def __init__(self, uses: Callable[[int], bool], optimizer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.spare = nn.Linear(32, 2)
        self.uses = uses
        self.optimizer = optimizer

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        features = torch.tanh(self.hidden(inputs))
        outputs = self.out(features) + (self.spare(features) if self.uses(batch_idx) else 0)
        loss = nn.functional.mse_loss(outputs, targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


def never(step: int) -> bool:
    return False


def at_times(step: int) -> bool:
    return step % 3 == 0


def in_second_half(step: int) -> bool:
    return step >= 3


def in_first_half(step: int) -> bool:
    return step < 3


def fit(num_ranks: int, strategy: Any, uses: Any, optimizer: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    model = Alternating(uses, optimizer)
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy, gradient_clip_val=0.5, **options)
    trainer.fit(model, regression_data(8, num_ranks))
    return model.losses, {name: weight.clone() for name, weight in model.state_dict().items()}


def fit_on_rank(stage: int, find_unused: bool, uses: Any, optimizer: Any, options: Any) -> Any:
    strategy = ParalZeROStrategy(stage=stage, find_unused_parameters=find_unused)
    return fit(2, strategy, uses, optimizer, **options)


@pytest.mark.parametrize(
    ("find_unused", "uses", "optimizer", "options"),
    [
        (False, never, adamw, {}),
        (True, at_times, sgd, {}),
        (True, in_second_half, sgd, {}),
        (True, in_first_half, adamw, {}),
        (True, at_times, sgd, {"accumulate_grad_batches": 2}),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_unused_parameters_do_not_change(
    on_ranks, stage: int, find_unused: bool, uses: Any, optimizer: Any, options: Any
) -> None:
    expected = fit(1, "auto", uses, optimizer, **options)
    assert_same_fit(on_ranks(2, fit_on_rank, stage, find_unused, uses, optimizer, options), expected, 2e-5)


def refusal(stage: int, find_unused: bool, uses: Any, optimizer: Any) -> str:
    with pytest.raises(UnusedParametersError) as caught:
        fit_on_rank(stage, find_unused, uses, optimizer, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("find_unused", "uses", "optimizer", "message"),
    [
        (False, in_first_half, sgd, "got no gradient in this step: spare.weight, spare.bias"),
        (False, in_second_half, sgd, "without a gradient in the first step got one now: spare.weight, spare.bias"),
        (True, at_times, adamw, "spare.weight took 1 of 3 steps and is used again"),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_unused_parameters_that_zero_would_change_are_named(
    on_ranks, stage: int, find_unused: bool, uses: Any, optimizer: Any, message: str
) -> None:
    for said in on_ranks(2, refusal, stage, find_unused, uses, optimizer):
        assert message in said


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


def fit_in_windows(num_ranks: int, kind: type[Regression], window: int, strategy: Any = "auto") -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = kind()
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy, accumulate_grad_batches=window)
    trainer.fit(model, regression_data(4, num_ranks))
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def fits_that_reorder() -> list[Any]:
    results: list[Any] = []
    for stage, overlap, find_unused in REORDERED:
        strategy = ParalZeROStrategy(stage=stage, overlap_comm=overlap, find_unused_parameters=find_unused)
        try:
            results.append(fit_in_windows(2, Reordering, 1, strategy))
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
    expected = fit_in_windows(1, Reordering, 1)
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
            results.append(fit_in_windows(2, kind, window, strategy))
        except UnusedParametersError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize(("kind", "window", "is_refused"), [(PenalizedLater, 1, False), (SwappedTasks, 2, True)])
def test_ranks_compare_new_passes_and_refuse_differing_ones(
    on_ranks, kind: type[Regression], window: int, is_refused: bool
) -> None:
    expected = fit_in_windows(1, kind, window)
    for results in on_ranks(2, fits_with_other_passes, kind, window):
        for result, find_unused in zip(results, (False, False, True), strict=True):
            if is_refused and not find_unused:
                assert "in a different order than in an earlier step" in result
            else:
                for name, weight in expected.items():
                    torch.testing.assert_close(result[name], weight)


class Skipping(Regression):
    """Discards the gradients of every second batch in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
        optimizer.zero_grad()


class CallingBackward(Skipping):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        Regression.training_step(self, batch, batch_idx).backward()
        self.optimizers().step()


def fit_skipping(num_ranks: int, strategy: Any = "auto", kind: type[Regression] = Skipping) -> Any:
    torch.manual_seed(3)
    model = kind()
    quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy).fit(model, regression_data(6, num_ranks))
    return model.losses, {name: weight.clone() for name, weight in model.state_dict().items()}


def fit_skipping_on_rank(stage: int, overlap: bool | None) -> Any:
    return fit_skipping(2, ParalZeROStrategy(stage=stage, overlap_comm=overlap))


@pytest.mark.parametrize(("stage", "overlap"), [(1, None), (1, True), (2, None), (2, True), (3, None)])
def test_gradients_discarded_by_zero_grad_do_not_count(on_ranks, stage: int, overlap: bool | None) -> None:
    assert_same_fit(on_ranks(2, fit_skipping_on_rank, stage, overlap), fit_skipping(1))


@pytest.mark.parametrize("stage", STAGES)
def test_calling_backward_of_the_loss_is_refused(stage: int) -> None:
    with pytest.raises(ConfigurationError, match=r"self.manual_backward\(loss\) instead"):
        fit_skipping(1, ParalZeROStrategy(stage=stage), CallingBackward)


class Grouped(Regression):
    """Trains by Adagrad with options of two groups and a schedule."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.hidden.parameters(), "lr": 0.3, "initial_accumulator_value": 0.1},
            {"params": self.out.parameters(), "weight_decay": 0.2},
        ]
        optimizer = torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8), "interval": "step"}]


def fit_grouped_on_rank(stage: int) -> Any:
    return fit_skipping(2, ParalZeROStrategy(stage=stage), Grouped)


@pytest.mark.parametrize("stage", STAGES)
def test_adagrad_keeps_its_groups_and_schedule(on_ranks, stage: int) -> None:
    assert_same_fit(on_ranks(2, fit_grouped_on_rank, stage), fit_skipping(1, kind=Grouped))
