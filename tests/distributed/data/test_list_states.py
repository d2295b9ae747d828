"""Metrics whose states are lists have the value of one process, also if ranks have other numbers of items, or none."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric, MetricCollection, MinMaxMetric
from torchmetrics.classification import BinaryAUROC
from torchmetrics.detection.mean_ap import MeanAveragePrecision
from torchmetrics.text import ROUGEScore

from lightning_paral.data.metrics import gather_over_data_ranks
from lightning_paral.distributed.mesh import ParallelDims


class Items(Metric):
    """Has a list of each kind, and a sum. Its value says what the lists contain, in any order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("tensors", "words", "nested"):
            self.add_state(name, [], dist_reduce_fx=None)
        self.add_state("numbers", [], dist_reduce_fx="cat")
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.tensors: list[Any]
        self.words: list[str]
        self.nested: Any
        self.numbers: Any
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

    def compute(self) -> Tensor:
        numbers = sorted(torch.cat(self.numbers).tolist())
        assert sorted(map(len, self.words)) == numbers
        assert sorted(tuple(each.shape) for each in self.tensors) == sorted((n,) * (n % 3) for n in numbers)
        assert sorted(int(number) for _, number, _ in self.nested) == [n for n in numbers if n % 2]
        assert self.numbers[0].dtype == torch.long
        assert self.total == sum(numbers)
        return torch.tensor(numbers).float().square().sum()


def values(num: int, data_rank: int = 0, data_size: int = 1) -> dict[str, float]:
    """Update metrics with this data rank's part of the numbers 1, 2, ..., one by one; return their values."""
    listed, of_steps, local = Items(), Items(dist_sync_on_step=True), Items(sync_on_compute=False)
    wrapped, overlap = MinMaxMetric(Items()), ROUGEScore(rouge_keys="rouge1")
    auroc = MetricCollection([BinaryAUROC(compute_on_cpu=True)])
    for number in range(1 + data_rank, num + 1, data_size):
        for metric in (listed, of_steps, local, wrapped):
            metric.update(torch.tensor([number]))
        auroc.update(torch.tensor([number / 10]), torch.tensor([int(number % 3 > 0)]))
        overlap.update(["a " * number], ["a a b"])
    with local.sync_context():
        found = {"local": local.compute()}
    found |= {"listed": listed.compute(), "of_steps": of_steps.compute(), "wrapped": wrapped.compute()["max"]}
    return {name: float(value) for name, value in (found | auroc.compute() | overlap.compute()).items()}


def values_on_ranks(num: int, tensor: int) -> dict[str, float]:
    dims = ParallelDims(rank=dist.get_rank(), replicate=dist.get_world_size() // tensor, tensor=tensor)
    with ExitStack() as undo:
        gather_over_data_ranks(dims, undo)
        return values(num, dims.data_rank, dims.data_size)


@pytest.mark.parametrize("num", [5, 1])
@pytest.mark.parametrize(("num_ranks", "tensor"), [(2, 1), (3, 1), (4, 2)])
def test_values_are_those_of_one_process(on_ranks, num: int, num_ranks: int, tensor: int) -> None:
    assert on_ranks(num_ranks, values_on_ranks, num, tensor) == [pytest.approx(values(num))] * num_ranks
