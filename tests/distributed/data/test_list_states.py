"""Metrics whose states are lists have the value of one process, also if ranks have other numbers of items, or none."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection, MinMaxMetric
from torchmetrics.classification import BinaryAUROC
from torchmetrics.detection.mean_ap import MeanAveragePrecision
from torchmetrics.text import ROUGEScore

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalPipelineStrategy, ParalZeROStrategy
from tests.models.chain import FEATURES, WIDTH, Chain
from tests.running import quiet_trainer

PLAN = {"blocks.*.inner.0": "colwise", "blocks.*.inner.1": "rowwise"}
STRATEGIES: dict[str, tuple[int, Any]] = {
    "one process": (1, lambda: "auto"),
    "paral_ddp": (2, partial(ParalDDPStrategy, split="global")),
    "paral_fsdp": (2, partial(ParalFSDPStrategy, split="global")),
    "paral_zero2": (2, partial(ParalZeROStrategy, stage=2, split="global")),
    "paral_tp": (2, partial(ParalFSDPStrategy, tensor_parallel=2, plan=PLAN, split="global")),
    "paral_fsdp_tp": (4, partial(ParalFSDPStrategy, tensor_parallel=2, plan=PLAN, split="global")),
    "paral_pp": (4, partial(ParalPipelineStrategy, stages=2, micro_batches=1, split="global")),
}


class Items(Metric):
    """Has a list of each kind, and a sum. Its value says what the lists contain, in any order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("tensors", "words", "nested"):
            self.add_state(name, [], dist_reduce_fx=None)
        self.add_state("numbers", [], dist_reduce_fx="cat")
        self.add_state("rows", [], dist_reduce_fx=lambda rows: rows)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.tensors: list[Tensor]
        self.words: list[str]
        self.nested: list[tuple[str, Tensor, Tensor]]
        self.numbers: list[Tensor]
        self.rows: list[Tensor]
        self.total: Tensor

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return self  # as in MeanAveragePrecision: torchmetrics' own method moves lists of tensors only

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist(dist_sync_fn, process_group)
        self.nested = MeanAveragePrecision._gather_tuple_list(self.nested, process_group)

    def update(self, numbers: Tensor) -> None:
        self.numbers.append(numbers.long())
        self.total += numbers.sum()
        for number in map(int, numbers):
            self.tensors.append(torch.ones((number,) * (number % 3)))
            self.words.append("x" * number)
            if number % 2:  # with batches of one sample, only one of two ranks
                self.nested.append(("odd", torch.tensor(number), torch.ones(number)))
                self.rows.append(torch.full((1, number), True))

    def compute(self) -> Tensor:
        numbers = sorted(torch.cat(self.numbers).tolist())
        rows = sorted(row.numel() for row in self.rows)
        assert sorted(map(len, self.words)) == numbers
        assert sorted(tuple(each.shape) for each in self.tensors) == sorted((n,) * (n % 3) for n in numbers)
        assert sorted(int(number) for _, number, _ in self.nested) == rows == [n for n in numbers if n % 2]
        assert self.numbers[0].dtype == torch.long
        assert self.total == sum(numbers)
        return torch.tensor(numbers).float().square().sum()


class Listing(Chain):
    """Has metrics with list states of many kinds, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.inner = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))  # 2 ranks divide it
        del self.never
        self.items = Items()
        self.logged = Items()
        self.of_steps = Items(dist_sync_on_step=True)
        self.local = Items(sync_on_compute=False)
        self.wrapped = MinMaxMetric(Items())
        self.auroc = MetricCollection([BinaryAUROC(compute_on_cpu=True)])
        self.overlap = ROUGEScore(rouge_keys="rouge1")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._update(batch[0][:, 0])
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._loss(batch)
        self._update(batch[0][:, 0])

    test_step = validation_step

    def _update(self, numbers: Tensor) -> None:
        for metric in (self.items, self.local, self.wrapped):
            metric.update(numbers)
        self.log("of_steps", self.of_steps(numbers), on_step=True, on_epoch=False)
        self.logged(numbers)
        self.log("logged", self.logged, on_step=True, on_epoch=True)
        self.auroc.update(numbers / 10, (numbers % 3 > 0).long())
        self.overlap.update([" ".join("a" * int(number)) for number in numbers], ["a a b"] * len(numbers))

    def on_train_epoch_end(self) -> None:
        self._log_computed("train")

    def on_validation_epoch_end(self) -> None:
        self._log_computed("val")

    def on_test_epoch_end(self) -> None:
        self._log_computed("test")

    def _log_computed(self, stage: str) -> None:
        with self.local.sync_context():
            self.log(f"{stage}_local", self.local.compute())
        values = {"items": self.items.compute(), "wrapped": self.wrapped.compute()["max"], **self.auroc.compute()}
        self.log_dict({f"{stage}_{name}": value for name, value in (values | self.overlap.compute()).items()})
        for metric in (self.items, self.local, self.wrapped, self.auroc, self.overlap, self.of_steps):
            metric.reset()


def values(label: str, num: int) -> dict[str, float]:
    """Fit and test with `num` samples, whose first features are 1, 2, ...; return all logged values."""
    num_ranks, strategy = STRATEGIES[label]
    torch.manual_seed(3)
    inputs = torch.arange(1.0, num + 1)[:, None].expand(num, FEATURES)
    loader = DataLoader(TensorDataset(inputs, torch.zeros(num, 3)), batch_size=2)
    trainer = quiet_trainer(strategy=strategy(), devices=num_ranks, max_epochs=2)
    module = Listing()
    found: dict[str, float] = {}
    for run in (trainer.fit, partial(trainer.validate, verbose=False), partial(trainer.test, verbose=False)):
        run(module, loader)
        found |= {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {key: value for key, value in found.items() if "step" not in key}


@pytest.mark.parametrize("num", [5, 1])
@pytest.mark.parametrize("label", ["paral_ddp", "paral_fsdp", "paral_zero2", "paral_tp", "paral_fsdp_tp", "paral_pp"])
def test_values_are_those_of_one_process(on_ranks, label: str, num: int) -> None:
    expected = values("one process", num)
    for found in on_ranks(STRATEGIES[label][0], values, label, num, timeout=60.0):
        assert found == pytest.approx(expected)
