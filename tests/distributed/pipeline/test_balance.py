"""`balance="time"` divides units by their operations, in the same way on all ranks, and trains as one process."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_paral import ActivationCheckpointing, ConfigurationError, ParalPipelineStrategy
from tests.models.chain import NUM_BATCHES, NUM_BLOCKS, WIDTH, Chain, fit_chain, loader
from tests.rank_pool import RankPool
from tests.running import quiet_trainer


@pytest.fixture
def on_ranks() -> Iterator[Any]:
    """Ranks that have not trained: with some builds of torch, others could not count in a fork."""
    pool = RankPool()
    try:
        yield pool.run
    finally:
        pool.close()


OUT = 30
"""The products after the last block then take as many operations as five blocks."""


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, OUT)
        self.down = nn.Linear(OUT, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class HasLargeHead(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.out = Head()  # type: ignore[assignment]


class HasLargeHeadBuiltLate(HasLargeHead):
    """Built in `configure_model`: no rank ever has the values of all blocks."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.is_built = False

    def configure_model(self) -> None:
        if self.is_built:
            return
        self.is_built = True
        torch.manual_seed(3)
        chain = HasLargeHead()
        for name, child in chain.named_children():
            setattr(self, name, child)
        for name, parameter in chain.named_parameters(recurse=False):
            self.register_parameter(name, parameter)


class ReadsValues(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > -1e9])


def fit_balanced(make: Any, options: dict[str, Any]) -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    torch.manual_seed(3)
    try:
        losses, module, trainer = fit_chain(
            ParalPipelineStrategy(split="global", balance="time", **options), 2, module=make()
        )
        trainer.validate(module, loader(2), verbose=False)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return list(losses.values()), [line.splitlines()[0] for line in lines if line.startswith("Pipeline: ")]


@pytest.mark.parametrize("make", [HasLargeHead, HasLargeHeadBuiltLate])
def test_large_head_leaves_fewer_units_to_the_last_stage(on_ranks, make: Any) -> None:
    torch.manual_seed(3)
    expected = list(fit_chain("auto", 1, module=make())[0].values())

    (losses, lines), (of_other, _) = on_ranks(2, fit_balanced, make, {})

    assert f"Pipeline: {NUM_BLOCKS - 1} + 1 units on 2 stages, with" in lines[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert of_other == losses


def test_recomputed_units_are_divided_as_well(on_ranks) -> None:
    options = {"activation_checkpointing": ActivationCheckpointing(units=["Block"])}

    for losses, _ in on_ranks(2, fit_balanced, Chain, options):
        assert len(losses) == NUM_BATCHES


def refusal() -> str:
    trainer = quiet_trainer(devices=2, strategy=ParalPipelineStrategy(balance="time"), max_steps=1)
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(ReadsValues(), loader(3))
    return str(error.value)


def test_steps_that_cannot_be_followed_are_refused_on_all_ranks(on_ranks) -> None:
    for message in on_ranks(2, refusal):
        assert "balance='time' cannot count the operations of ReadsValues: the training step cannot be" in message
        assert "Set balance='params'" in message


def fit_twice() -> list[int]:
    trainer = quiet_trainer(devices=2, strategy=ParalPipelineStrategy(balance="time"), max_steps=1)
    module, steps = Chain(), []
    for trainer.fit_loop.epoch_loop.max_steps in (1, 3):
        trainer.fit(module, loader(3))
        steps.append(trainer.global_step)
    return steps


def test_a_second_fit_uses_the_count_of_the_first(on_ranks) -> None:
    assert on_ranks(2, fit_twice) == [[1, 3]] * 2
