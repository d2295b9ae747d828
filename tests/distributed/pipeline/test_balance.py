"""`balance="time"` divides units by their operations, in the same way on all ranks, and trains as one process."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ConfigurationError, ParalPipelineStrategy
from lightning_paral.diagnostics.rank_pool import RankPool
from tests.models.chain import NUM_BLOCKS, WIDTH, Chain, fit_chain, loader
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


class ReadsValues(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > -1e9])


def fit_balanced() -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        losses, module, trainer = fit_chain(
            ParalPipelineStrategy(split="global", balance="time"), 2, module=HasLargeHead
        )
        trainer.validate(module, loader(2), verbose=False)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return list(losses.values()), [line.splitlines()[0] for line in lines if line.startswith("Pipeline: ")]


def test_large_head_leaves_fewer_units_to_the_last_stage(on_ranks) -> None:
    torch.manual_seed(3)
    expected = list(fit_chain("auto", 1, module=HasLargeHead)[0].values())

    (losses, lines), (of_other, _) = on_ranks(2, fit_balanced)

    assert f"Pipeline: {NUM_BLOCKS - 1} + 1 units on 2 stages, with" in lines[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert of_other == losses


def refusal() -> str:
    trainer = quiet_trainer(devices=2, strategy=ParalPipelineStrategy(balance="time"), max_steps=1)
    with pytest.raises(ConfigurationError) as error:
        trainer.fit(ReadsValues(), loader(3))
    return str(error.value)


def test_steps_that_cannot_be_followed_are_refused_on_all_ranks(on_ranks) -> None:
    for message in on_ranks(2, refusal):
        assert "balance='time' cannot count the operations of ReadsValues: the training step cannot be" in message
        assert "Set balance='params'" in message
