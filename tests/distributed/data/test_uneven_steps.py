"""Training steps in which ranks have different numbers of samples, or none: what is weighted, kept, and rejected."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_paral import ConfigurationError, ParalDDPStrategy
from tests.contract.cases import strategy_of
from tests.models.logging_everything import Stream
from tests.running import quiet_trainer

RANKS = 3


def samples(num: int) -> Tensor:
    return torch.arange(1.0, num + 1)


class Recording(LightningModule):
    """Logs the mean of its samples with the options of the test."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.options = {"on_step": True, "on_epoch": True} | options

    def value(self, batch: Tensor) -> Tensor:
        return batch.mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("value", self.value(batch), **self.options)
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Watch(Callback):
    """Records what callbacks see after each step and epoch."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.epochs: list[float] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if "value_step" in trainer.callback_metrics:
            self.steps.append(trainer.callback_metrics["value_step"].item())

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.on_train_batch_start(trainer)
        self.epochs.append(trainer.callback_metrics["value_epoch"].item())


def fit(
    module: LightningModule, num: int, batch_size: int, strategy: Any = None, devices: int = RANKS
) -> tuple[dict[str, float], Watch]:
    watch = Watch()
    strategy = strategy or ParalDDPStrategy(split="global")
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=1, callbacks=[watch])
    trainer.fit(module, DataLoader(samples(num), batch_size))  # type: ignore[arg-type]
    return {key: float(value) for key, value in trainer.callback_metrics.items()}, watch


# What is weighted


class NotANumberForCopies(Recording):
    def value(self, batch: Tensor) -> Tensor:
        is_copy = batch.tolist() == [4.0] and self.global_rank != 0
        return torch.tensor(float("nan")) if is_copy else batch.mean()


def values_of_copies(reduce_fx: str) -> tuple[list[float], list[float]]:
    _, watch = fit(NotANumberForCopies(sync_dist=True, reduce_fx=reduce_fx), 4, 3)
    return watch.steps, watch.epochs


@pytest.mark.parametrize(
    ("reduce_fx", "step", "epoch"), [("mean", 2.0, 2.5), ("sum", 6.0, 10.0), ("max", 3.0, 4.0), ("min", 1.0, 1.0)]
)
def test_repeated_samples_count_nowhere(on_ranks, reduce_fx: str, step: float, epoch: float) -> None:
    for steps, epochs in on_ranks(RANKS, values_of_copies, reduce_fx):
        assert (steps, epochs) == ([pytest.approx(step), 4.0], [pytest.approx(epoch)])


# Steps


def values_of_batches(remainder: Any) -> tuple[list[float], list[float]]:
    _, watch = fit(Recording(sync_dist=True), 9, 2, ParalDDPStrategy(split="batch", remainder=remainder))
    return watch.steps, watch.epochs


def test_values_of_whole_batches_are_means_over_ranks_per_step_and_over_samples_per_epoch(on_ranks) -> None:
    # Batches (1, 2), (3, 4), (5, 6), then (7, 8), (9) and, to complete the step, (1, 2) again.
    for steps, epochs in on_ranks(RANKS, values_of_batches, "wrap"):
        assert steps == pytest.approx([3.5, (7.5 + 9 + 1.5) / 3])
        assert epochs == pytest.approx([(sum(range(1, 10)) + 3) / 11])
    for steps, epochs in on_ranks(RANKS, values_of_batches, "drop"):
        assert (steps, epochs) == ([3.5], [3.5])


class DrawsItself(Recording):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        return (self.weight * next(dataloader_iter)[0]).mean()


def refusal() -> str:
    with pytest.raises(ConfigurationError) as raised:
        fit(DrawsItself(), 5, 4)
    return str(raised.value)


def test_a_batch_with_fewer_samples_than_ranks_is_rejected(on_ranks) -> None:
    for message in on_ranks(RANKS, refusal):
        assert "training_step takes a `dataloader_iter`" in message


# Evaluation


class Evaluated(Recording):
    """Logs what depends on how a batch is divided: means of batches, and means of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = batch.mean()
        self.mean(loss)
        self.log("metric", self.mean)
        for name, size in {"one": 1, "eight": 8, "found": None, "given": len(batch)}.items():
            self.log(name, loss, batch_size=size, sync_dist=True)
        self.log("sum", batch.sum(), reduce_fx="sum", sync_dist=True)
        self.log("step", loss, on_step=True, on_epoch=False, sync_dist=True)


class Seen(Callback):
    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        self.steps.append(float(trainer.logged_metrics["step"]))


def evaluated(num: int, batch_size: int, label: str, split: str, stream: bool, devices: int) -> Any:
    strategy = strategy_of(label, **({} if devices == 1 else {"split": split}))
    seen = Seen()
    trainer = quiet_trainer(strategy=strategy, devices=devices, callbacks=[seen])
    dataset: Any = Stream(samples(num)) if stream else samples(num)
    return trainer.validate(Evaluated(), DataLoader(dataset, batch_size), verbose=False)[0], seen.steps


@pytest.mark.parametrize("split", ["batch", "global"])
@pytest.mark.parametrize(
    ("label", "sizes"),
    [
        *(("paral_ddp", sizes) for sizes in ((13, 4), (11, 5), (10, 6), (7, 6), (2, 6), (4, 3), (12, 6))),
        *(("paral_fsdp", sizes) for sizes in ((11, 5), (7, 6))),
    ],
)
def test_evaluation_equals_one_process_however_its_means_are_taken(
    on_ranks, label: str, sizes: tuple[int, int], split: str
) -> None:
    for stream in (False, True):
        expected, steps = evaluated(*sizes, "auto", split, stream, 1)
        for found, found_steps in on_ranks(RANKS, evaluated, *sizes, label, split, stream, RANKS):
            if split == "global" and sizes[1] == RANKS:  # a rank always has one sample, so 1 is taken for their number
                assert found.pop("one") == expected["found"] != expected["one"]
                found["one"] = expected["one"]
            assert found == pytest.approx(expected)
            if split == "global" and not stream and sizes[0] % sizes[1] not in (1, 2):
                assert found_steps == pytest.approx(steps)
