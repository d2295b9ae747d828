"""Features of `ParalFSDPStrategy` besides training as in one process."""

import logging
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ConfigurationError, ParalFSDPStrategy
from lightning_paral.model import host_memory_check as room
from tests.models.blocks import Block, OnTheModule, Tied
from tests.models.tokens import LENGTH, fit, token_loader
from tests.running import assert_same_fit, quiet_trainer

NUM_BATCHES = 4


class Watched(OnTheModule):
    """Evaluates, predicts, and calls itself in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def on_train_epoch_end(self) -> None:
        tokens = torch.arange(LENGTH).unsqueeze(0)
        with torch.no_grad():
            self.seen += [self(tokens).sum().item(), self.embedding(tokens).sum().item()]


def everything(num_ranks: int, strategy: Any) -> list[Any]:
    torch.manual_seed(5)
    model = Watched()
    parameters, hooks = dict(model.named_parameters()), len(model._forward_hooks)
    results: list[Any] = []
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, strategy=strategy, gradient_clip_val=0.5)
    loader = token_loader(NUM_BATCHES, num_ranks)
    for name in ("validate", "fit", "predict", "test", "fit", "validate"):
        if name == "predict":
            results.append(torch.cat(trainer.predict(model, loader)).abs().mean().item())  # `mean` is nearly 0
        elif name == "fit":
            trainer.fit_loop.epoch_progress.reset()
            trainer.fit(model, loader, loader)
        else:
            results.append(getattr(trainer, name)(model, loader, verbose=False)[0]["loss"])
        assert type(model) is Watched
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
        assert len(model._forward_hooks) == hooks
        assert not [attribute for attribute in vars(model) if "fsdp" in attribute]
    return [*results, *model.seen]


def everything_on_rank() -> list[Any]:
    return everything(2, "paral_fsdp")


def test_all_trainer_functions_run_in_any_order_and_restore_the_module(on_ranks) -> None:
    expected = everything(1, "auto")

    ranks = on_ranks(2, everything_on_rank)

    mean = [sum(values) / 2 for values in zip(*ranks, strict=True)]
    assert mean == pytest.approx(expected, rel=1e-5)


class FailsOnce(Tied):
    """Fails in the third step of its first fit."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        loss = super().training_step(batch, batch_idx)
        if self.num_steps == 3:
            raise ArithmeticError("the reason")
        return loss


def fit_after_failure() -> str:
    model = FailsOnce()
    with pytest.raises(ArithmeticError, match="the reason"):
        fit(lambda: model, 4, 2, strategy="paral_fsdp")
    with pytest.raises(ConfigurationError) as refused:
        fit(lambda: model, 4, 2, strategy="paral_fsdp")
    fit(FailsOnce, 1, 2, strategy="paral_fsdp")
    return str(refused.value)


def test_module_of_a_failed_fit_is_refused_and_a_new_one_trains(on_ranks) -> None:
    for message in on_ranks(2, fit_after_failure):
        assert message.startswith("FailsOnce was left sharded by an earlier run, which could not gather it: the run fa")


OPTIONS: dict[str, dict[str, Any]] = {
    "keep gathered": {"reshard_after_forward": False},
    "reshard the root, too": {"reshard_after_forward": True},
    "predicate": {"units": lambda name, module: name.startswith("blocks.") and name.count(".") == 1},
    "nested": {"units": [Block, "Linear"]},
}


def fit_with_options(label: str, num_ranks: int) -> Any:
    return fit(OnTheModule, NUM_BATCHES, num_ranks, gradient_clip_val=0.5, strategy=ParalFSDPStrategy(**OPTIONS[label]))


@cache
def fit_in_one_process() -> Any:
    return fit(OnTheModule, NUM_BATCHES, 1, gradient_clip_val=0.5)


@pytest.mark.parametrize("label", OPTIONS)
def test_options_do_not_change_results(on_ranks, label: str) -> None:
    assert_same_fit(on_ranks(4, fit_with_options, label, 4), fit_in_one_process())


class Compiled(Tied):
    """Has blocks compiled by a backend that only captures graphs, which shows graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


def fit_compiled_on_rank() -> Any:
    return fit(Compiled, NUM_BATCHES, 2, strategy="paral_fsdp")


def test_compiled_blocks_train(on_ranks) -> None:
    assert_same_fit(on_ranks(2, fit_compiled_on_rank), fit(Tied, NUM_BATCHES, 1))


def logged_in_two_fits(logger: logging.Logger) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        trainer = quiet_trainer(max_steps=1, devices=2, strategy=ParalFSDPStrategy())
        trainer.fit(Tied(), token_loader(1, 2))
        trainer.fit(Tied(), token_loader(1, 2))
    finally:
        logger.removeHandler(handler)
    return lines


def printed_tree() -> list[str]:
    lines = logged_in_two_fits(logging.getLogger("lightning.pytorch.utilities.rank_zero"))
    return [line for line in lines if line.startswith("FSDP: ")]


def test_units_are_printed_once_with_their_sizes(on_ranks) -> None:
    (tree,), nothing = on_ranks(2, printed_tree)

    assert nothing == []
    assert tree == (
        "FSDP: 4 units over 2 ranks\n"
        "Tied (the root): 320 parameters, 1.25 KiB\n"
        "└─ blocks.0 ... blocks.2 (Block): 3 x 1,632 parameters, 6.38 KiB"
    )


def fit_without_room() -> tuple[str, str]:
    model, (probe, room.available_bytes) = Tied(), (room.available_bytes, lambda: 2 * 4 * 5000)
    trainer = quiet_trainer(max_steps=1, devices=2, strategy="paral_fsdp")
    try:
        trainer.fit(model, token_loader(1, 2))
    finally:
        room.available_bytes = probe
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(model, token_loader(1, 2))
    return type(next(model.parameters())).__name__, str(caught.value)


def test_model_larger_than_host_memory_stays_sharded(on_ranks) -> None:
    for kind, message in on_ranks(2, fit_without_room):
        assert kind == "DTensor"
        assert "2 ranks per node would need" in message
        assert "Load a checkpoint" in message


class UsedFirst(Tied):
    """Uses a layer in the first batch of each accumulation window only."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(LENGTH, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.shift(batch[0].float() / 10).square().mean() if batch_idx % 2 == 0 else loss


def fit_replicas() -> tuple[list[float], dict[str, Tensor]]:
    return fit(UsedFirst, NUM_BATCHES, 2, strategy=ParalFSDPStrategy(replicate=2), accumulate_grad_batches=2)


def test_replicas_average_what_a_window_accumulates(on_ranks) -> None:
    expected = fit(UsedFirst, NUM_BATCHES, 1, accumulate_grad_batches=2)

    assert_same_fit(on_ranks(2, fit_replicas), expected)
