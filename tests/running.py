"""Run a Trainer in a test, read what it says, and compare the trained weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor


def quiet_trainer(**options: Any) -> Trainer:
    """Return a Trainer on CPU that writes no files and prints nothing, unless `options` say otherwise."""
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(**({"accelerator": "cpu", "enable_model_summary": False, **silent} | options))


class SaveAt(Callback):
    """Saves a checkpoint to `path` after optimizer step number `step`."""

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def assert_same_fit(
    ranks: list[tuple[list[float], dict[str, Tensor]]],
    expected: tuple[list[float], dict[str, Tensor]],
    tolerance: float = 1e-5,
) -> None:
    """Assert that the mean losses of the ranks, and the weights of each rank, equal those of one process.

    Args:
        ranks: the losses and the weights of each rank.
        expected: the losses and the weights of one process.
        tolerance: the largest difference, relative for losses and absolute for weights.
    """
    losses = torch.tensor([losses for losses, _ in ranks]).mean(dim=0)
    torch.testing.assert_close(losses, torch.tensor(expected[0]), rtol=tolerance, atol=0.0)
    for _, weights in ranks:
        assert weights.keys() == expected[1].keys()
        for name, weight in weights.items():
            assert ((weight - expected[1][name]).abs() <= tolerance).all(), name


@contextmanager
def logged(name: str, level: int = logging.INFO) -> Iterator[list[str]]:
    """Collect the messages that the logger `name` gets inside the context."""
    logger, messages = logging.getLogger(name), list[str]()
    handler, level_before = logging.Handler(level), logger.level
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
