"""Ranks that log different keys with `sync_dist=True` get an error that names the keys."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from lightning_paral.data import results
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.process_group import release_process_group
from tests.contract.cases import strategy_of
from tests.launching import leave_pool
from tests.models.linear import Linear, ones
from tests.running import quiet_trainer

ORDERS = {
    "another": (["a"], ["b"]),
    "another_order": (["a", "b"], ["b", "a"]),
    "fewer": (["a", "b", "c"], ["a", "b"]),
    "none": (["a"], []),
    "same": (["a", "b"], ["a", "b"]),
}


class Logging(Linear):
    """Logs the keys that the test gives its rank."""

    def __init__(self, keys: str, reduce_fx: str, on_step: bool) -> None:
        super().__init__()
        self.keys = ORDERS[keys]
        self.options = {"reduce_fx": reduce_fx, "on_step": on_step, "on_epoch": not on_step, "sync_dist": True}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for key in self.keys[self.global_rank]:
            self.log(key, torch.tensor(1.0 + self.global_rank + ord(key)), **self.options)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("v", torch.tensor(1.0 + self.global_rank), on_step=True, on_epoch=True, sync_dist=True)


def outcome(run: Any, trainer: Any, *arguments: Any, **options: Any) -> dict[str, float] | str:
    """Return the logged values, or the error."""
    try:
        run(*arguments, **options)
    except ValueError as error:
        return str(error)
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def fit_module(module: Linear, strategy: Any = "paral_ddp", **options: Any) -> dict[str, float] | str:
    trainer = quiet_trainer(strategy=strategy, devices=2, **({"max_epochs": 1, "limit_val_batches": 0} | options))
    return outcome(trainer.fit, trainer, module, ones(), ones())


def validate(module: Linear, num_samples: int) -> dict[str, float] | str:
    trainer = quiet_trainer(strategy="paral_ddp", devices=2)
    return outcome(trainer.validate, trainer, module, ones(num_samples, 2), verbose=False)


def fit(strategy: str, keys: str, reduce_fx: str, on_step: bool) -> dict[str, float] | str:
    options = {"max_epochs": 2, "limit_val_batches": 1.0, "num_sanity_val_steps": 0}
    return fit_module(Logging(keys, reduce_fx, on_step), strategy, **options)


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("keys", ["another", "another_order"])
def test_differing_key_is_reported_in_the_same_step(on_ranks, keys: str, reduce_fx: str) -> None:
    first, second = on_ranks(2, fit, "paral_ddp", keys, reduce_fx, True)

    assert "same values: logged 'training_step.a' with sync_dist=True" in first
    assert "in training batch 0 of epoch 0 on rank 0 and logged 'training_step.b'" in first
    assert second == first


@pytest.mark.parametrize("keys", ["another", "another_order", "fewer", "none"])
@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero1"])
def test_keys_that_only_some_ranks_log_are_reported_at_the_end_of_the_epoch(on_ranks, strategy: str, keys: str) -> None:
    odd = {"another": "'training_step.a' exists on rank 0 only", "fewer": "'training_step.c' exists on rank 0 only"}
    odd |= {"none": "'training_step.a' exists on rank 0 only", "another_order": "The order differs"}

    for message in on_ranks(2, fit, strategy, keys, "mean", False):
        assert odd[keys] in message


@pytest.mark.parametrize("on_step", [True, False])
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max", "min"])
def test_equal_keys_give_the_values_of_lightning(on_ranks, reduce_fx: str, on_step: bool) -> None:
    expected = on_ranks(2, fit, "ddp", "same", reduce_fx, on_step)

    assert on_ranks(2, fit, "paral_ddp", "same", reduce_fx, on_step) == expected


def fit_on_device(keys: str, reduce_fx: str) -> dict[str, float] | str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "can_be_read_at_once", lambda value: False)  # as on a GPU
        return fit("paral_ddp", keys, reduce_fx, True)


@pytest.mark.parametrize("reduce_fx", ["mean", "min"])
def test_differing_key_is_reported_where_the_host_does_not_wait(on_ranks, reduce_fx: str) -> None:
    for message in on_ranks(2, fit_on_device, "another", reduce_fx):
        assert "same values: logged 'training_step.a' with sync_dist=True" in message
        assert "in training batch 0 of epoch 0 on rank 0 and logged 'training_step.b'" in message
    expected = on_ranks(2, fit, "paral_ddp", "same", reduce_fx, True)
    assert on_ranks(2, fit_on_device, "same", reduce_fx) == expected


def reduce_on_device(keys: list[str], reduce_op: str) -> float:
    def reduce(tensor: Tensor, reduce_op: str, group: Any) -> Tensor:
        dist.all_reduce(tensor, dist.ReduceOp.MAX if reduce_op == "max" else dist.ReduceOp.SUM)
        return tensor / 2 if reduce_op == "mean" else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "can_be_read_at_once", lambda value: False)
        history = results.LoggedHistory(ParallelDims(rank=dist.get_rank(), replicate=2))
        logged = results.SharedResults(history, training=True)
        value = results.CheckedReduce(keys[dist.get_rank()], reduce, logged)(torch.tensor(1.0), reduce_op=reduce_op)
        assert bool(history.differs) == math.isnan(value)
        return float(value)


@pytest.mark.parametrize(("reduce_op", "value"), [("mean", 1.0), ("sum", 2.0), ("max", 1.0)])
def test_values_of_different_keys_are_not_a_number_until_the_error(on_ranks, reduce_op: str, value: float) -> None:
    assert on_ranks(2, reduce_on_device, ["a", "a"], reduce_op) == [value] * 2
    assert all(map(math.isnan, on_ranks(2, reduce_on_device, ["a", "b"], reduce_op)))


class OtherDtypes(Logging):
    """Logs a value of which rank 0 has float64 and the others float32, as with `torch.tensor(np.mean(...))`."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        dtype = torch.float64 if self.global_rank == 0 else torch.float32
        self.log("a", torch.tensor(5.0 + 2 * self.global_rank, dtype=dtype), **self.options)
        return Linear.training_step(self, batch, batch_idx)


def fit_other_dtypes(reduce_fx: str, on_step: bool) -> dict[str, float] | str:
    return fit_module(OtherDtypes("same", reduce_fx, on_step))


@pytest.mark.parametrize("on_step", [True, False])
def test_ranks_may_log_values_of_different_dtypes(on_ranks, on_step: bool) -> None:
    for reduce_fx, expected in {"mean": 6.0, "sum": 12.0 if on_step else 24.0, "max": 7.0, "min": 5.0}.items():
        assert on_ranks(2, fit_other_dtypes, reduce_fx, on_step, timeout=60.0) == [{"a": expected}] * 2


class OtherSteps(Logging):
    """Rank 1 logs the value `distance` steps after rank 0."""

    def __init__(self, distance: int, reduce_fx: str, group: Any) -> None:
        super().__init__("same", reduce_fx, True)
        self.distance = distance
        self.options["sync_dist_group"] = group

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1 + self.distance * self.global_rank:
            self.log("x", torch.tensor(1.0 + batch_idx), **self.options)


def validate_other_steps(distance: int, reduce_fx: str, in_group: bool) -> Any:
    return validate(OtherSteps(distance, reduce_fx, dist.new_group([0, 1]) if in_group else None), 48)


@pytest.mark.parametrize(("reduce_fx", "in_group"), [("mean", False), ("sum", True), ("max", False), ("min", True)])
@pytest.mark.parametrize("distance", [1, 8])
def test_values_of_different_steps_are_not_reduced_together(
    on_ranks, distance: int, reduce_fx: str, in_group: bool
) -> None:
    extra = "" if reduce_fx == "mean" else f" and reduce_fx='{reduce_fx}'"
    first, second = on_ranks(2, validate_other_steps, distance, reduce_fx, in_group, timeout=60.0)

    logged = f"logged 'validation_step.x' with sync_dist=True{extra}"
    assert (
        f"{logged} in validation batch 1 on rank 0 and {logged} in validation batch {1 + distance} on rank 1" in first
    )
    assert second == first


class LogsMetric(Logging):
    """Only rank 0 logs the metric."""

    def __init__(self, metric: Metric, **options: Any) -> None:
        super().__init__("same", "mean", False)
        self.metric = metric
        self.options = {"on_step": False, "on_epoch": True} | options

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.metric.update(torch.tensor(1.0 + self.global_rank))
        if self.global_rank == 0:
            self.log("acc", self.metric, **self.options)
        return Linear.training_step(self, batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def log_metric_on_rank_0(options: dict[str, Any]) -> dict[str, float] | str:
    return fit_module(LogsMetric(MeanMetric(), **options))


@pytest.mark.parametrize("rank_zero_only", [False, True])
def test_metric_that_is_synchronized_and_that_only_rank_0_logs_is_reported(on_ranks, rank_zero_only: bool) -> None:
    options = {"rank_zero_only": rank_zero_only}
    for message in on_ranks(2, log_metric_on_rank_0, options, timeout=60.0):
        assert message.startswith(
            "The ranks have not synchronized the same keys in this epoch: the metric 'training_step.acc' exists on "
            "rank 0 only. Every rank must log the same keys with sync_dist=True, and log and compute the same metrics"
        )


def validate_metric_of_rank_0(is_synchronized: bool) -> Any:
    return validate(LogsMetric(MeanMetric(sync_on_compute=is_synchronized), rank_zero_only=True), 8)


def test_metric_that_rank_0_logs_in_evaluation_is_computed_on_all_ranks(on_ranks) -> None:
    assert on_ranks(2, validate_metric_of_rank_0, True, timeout=60.0) == [{"acc": 1.5}] * 2
    assert on_ranks(2, validate_metric_of_rank_0, False, timeout=60.0) == [{"acc": 1.0}, {}]


class LeavesOut(Logging):
    """Rank 1 does not log in batch 1."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.keys = ["a"], [] if batch_idx == 1 else ["a"]
        return super().training_step(batch, batch_idx)


def leave_out() -> str:
    leave_pool()
    try:
        fit_module(LeavesOut("same", "mean", True), strategy_of("paral_ddp", timeout=3.0))
    except RuntimeError as error:
        return str(error)
    finally:
        release_process_group(after_failure=True)
    return ""


def test_value_that_a_rank_leaves_out_is_named_when_the_others_have_waited_for_the_timeout(in_own_world) -> None:
    first, second = in_own_world(2, leave_out)

    assert "This rank was reducing self.log('a', sync_dist=True). Every rank must log the same keys" in first
    assert "did not finish within timeout=0:00:03" in second
