"""Modules that were not written for ZeRO train as in one process at every stage."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_paral import ParalZeROStrategy
from lightning_paral.model import host_memory_check as room
from tests.models.regression import Regression, regression_data
from tests.models.tokens import LENGTH, VOCABULARY, Fitted, fit, token_loader
from tests.running import assert_same_fit, quiet_trainer

NUM_BATCHES = 5
STAGES = ("paral_zero1", "paral_zero2", "paral_zero3")


class BuiltLate(Fitted):
    """Sets initial values in all the ways that people use in `configure_model`."""

    def configure_model(self) -> None:
        if hasattr(self, "embedding"):
            return
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.hidden = nn.Sequential(nn.Linear(LENGTH * 16, 64), nn.ReLU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.3)
        nn.init.xavier_uniform_(self.hidden[0].weight)
        self.hidden[0].bias.data.fill_(0.1)
        with torch.no_grad():
            self.hidden[2].weight.mul_(2.0)
        self.hidden.apply(self.shift)
        self.gain = nn.Parameter(torch.tensor(1.5))

    @staticmethod
    def shift(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.data.add_(0.05)

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        hidden = self.hidden(self.embedding(tokens).flatten(1))
        return nn.functional.cross_entropy(self.gain * self.head(hidden), tokens[:, 0])

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        assert len(matrices) == 3
        assert len(others) == 3
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others}], lr=5e-3)


def losses_of_late_model(
    num_ranks: int, strategy: Callable[[], Any] = lambda: "auto"
) -> tuple[list[float], list[tuple[int, ...]]]:
    torch.manual_seed(5)
    model = BuiltLate()
    for _ in range(2):  # the second fit continues with the parameters of the first
        trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy())
        trainer.fit(model, token_loader(NUM_BATCHES, num_ranks))
    return model.losses, [tuple(p.shape) for p in model.parameters()]


def losses_of_late_model_without_room() -> tuple[list[float], list[tuple[int, ...]]]:
    available, room.available_bytes = room.available_bytes, lambda: 0
    try:
        return losses_of_late_model_on_rank()
    finally:
        room.available_bytes = available


def losses_of_late_model_on_rank() -> tuple[list[float], list[tuple[int, ...]]]:
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    return losses_of_late_model(2, lambda: ParalZeROStrategy(stage=3, deepspeed_config=config))


@pytest.mark.parametrize("has_room", [True, False])
def test_parameters_are_full_after_the_run_if_memory_suffices(on_ranks, has_room: bool) -> None:
    expected, whole = losses_of_late_model(1)

    ranks = on_ranks(2, losses_of_late_model_on_rank if has_room else losses_of_late_model_without_room)

    losses = torch.tensor([losses for losses, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=0.0)
    for _, shapes in ranks:
        assert shapes == (whole if has_room else [(0,)] * len(whole))


class Answers(Fitted):
    """Has a submodule and a `predict_step` that return objects without tensors."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.hidden = nn.Linear(LENGTH, 4)
        self.judge = Judge(answer)

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.hidden(batch[0].float() / VOCABULARY)
        self.judge(hidden)
        return hidden.square().mean()

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.loss(batch)
        return self.judge.answer


class Judge(nn.Module):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


ANSWERS = (3, 1.5, "file.txt", None, [1, 2], {0: 1}, (1, "a"), frozenset({1}))


def fit_and_predict_answers() -> tuple[list[Any], list[float]]:
    predicted, losses = [], []
    for answer in ANSWERS:
        model = Answers(answer)
        trainer = quiet_trainer(max_epochs=1, devices=2, strategy="paral_zero3")
        predicted.append(trainer.predict(model, token_loader(1, 2)))
        trainer.fit(model, token_loader(1, 2))
        losses += model.losses
    return predicted, losses


def test_any_output_of_steps_and_modules_at_stage_3(on_ranks) -> None:
    for predicted, losses in on_ranks(2, fit_and_predict_answers):
        assert predicted == [[answer] for answer in ANSWERS]
        assert len(losses) == len(ANSWERS)


def fit_after_failed_predict() -> list[float]:
    torch.manual_seed(5)
    model = Answers(ValueError("no answer"))
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy="paral_zero3")
    with pytest.raises(ValueError, match="no answer"):
        trainer.predict(model, token_loader(1, 2))
    model.losses, model.judge.answer = [], None
    trainer.fit(model, token_loader(NUM_BATCHES, 2))
    return model.losses


def test_fit_after_a_failed_predict_at_stage_3(on_ranks) -> None:
    expected, _ = fit(lambda: Answers(None), NUM_BATCHES, 1)
    losses = torch.tensor(on_ranks(2, fit_after_failed_predict)).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-5, atol=0.0)


class KeepsEngine(Callback):
    """Keeps the engine of a fit, and drops it during the next fit."""

    def __init__(self) -> None:
        self.engines: list[Any] = []
        self.momentum = 0.0

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and not self.engines:
            self.engines.append(trainer.strategy.model)
            return
        self.engines.clear()
        gc.collect()
        strategy: Any = trainer.strategy
        self.momentum = float(strategy.full_optimizer_state(module.hidden.weight, "exp_avg").abs().sum())


def collect_engine_of_an_earlier_fit(strategy: str) -> float:
    torch.manual_seed(0)
    module, keeps = Regression(), KeepsEngine()
    for num_batches in (1, 2):
        trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[keeps])
        trainer.fit(module, regression_data(num_batches, 2))
        assert len(keeps.engines) == 2 - num_batches
    return keeps.momentum


@pytest.mark.parametrize("strategy", STAGES)
def test_collecting_the_engine_of_an_earlier_fit_changes_nothing(on_ranks, strategy: str) -> None:
    first, second = on_ranks(2, collect_engine_of_an_earlier_fit, strategy)
    assert first == second > 0


class Lazy(Fitted):
    """Builds layers of a class that is defined and decorated when the first model is built."""

    kind: Any = None

    def configure_model(self) -> None:
        if hasattr(self, "hidden"):
            return
        if Lazy.kind is None:

            class Scaled(nn.Linear):
                def __init__(self, *sizes: int) -> None:
                    super().__init__(*sizes)

                def forward(self, inputs: Tensor) -> Tensor:
                    return super().forward(inputs) * self.scale

            Lazy.kind = with_scale(with_scale(Scaled))
        self.hidden = Lazy.kind(LENGTH, 16)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return (self.hidden(batch[0].float() / VOCABULARY).mean(dim=1) - 1).square().mean()


def with_scale(kind: Any) -> Any:
    original = kind.__init__

    @functools.wraps(original)
    def build(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.scale = 2.0

    kind.__init__ = build
    return kind


def fit_lazily(num_ranks: int, **options: Any) -> Any:
    return fit(Lazy, NUM_BATCHES, num_ranks, **options)


def fit_lazily_twice() -> tuple[Any, Any, list[bool]]:
    Lazy.kind = None
    fits = [fit_lazily(2, strategy="paral_zero3") for _ in range(2)]
    plain = Lazy.kind(LENGTH, 16)
    return *fits, [hasattr(parameter, "ds_id") for parameter in plain.parameters()]


def test_classes_defined_in_configure_model_keep_their_decorators(on_ranks) -> None:
    ranks = on_ranks(2, fit_lazily_twice)
    expected = fit_lazily(1)
    assert_same_fit([first for first, _, _ in ranks], expected)
    assert_same_fit([second for _, second, _ in ranks], expected)
    assert [are_partitioned for *_, are_partitioned in ranks] == [[False, False]] * 2
