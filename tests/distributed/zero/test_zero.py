"""Hooks, fits after a failed one, memory and traffic under ZeRO are as under other strategies, and as in the paper."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral import ParalZeROStrategy
from tests.benchmarks.zero_memory import bytes_by_formula, bytes_held
from tests.benchmarks.zero_traffic import model_sizes_by_formula, model_sizes_sent_per_step
from tests.models.reading import read_values
from tests.models.regression import Regression, fit_regression, regression_data
from tests.running import assert_same_fit, quiet_trainer

STAGES = ("paral_zero1", "paral_zero2", "paral_zero3")
WITH_OFFLOAD = (*STAGES, "paral_zero2_offload", "paral_zero3_offload")


# Accumulation, clipping, hooks


class Hooked(Regression):
    """Clips in its own hook by value and then by norm, scales the loss, warms up, and records what hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Tensor]] = []
        self.calls: list[str] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss, *args, **kwargs)

    def on_after_backward(self) -> None:
        self.calls.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameters, with_state = dict(self.named_parameters()), self.trainer.global_step > 0
        self.seen.append(read_values(self.trainer.strategy, parameters, optimizer, with_state=with_state))

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="value")
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (self.trainer.global_step + 1) / 4)
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append("lr_scheduler_step")


def fit_hooked(num_ranks: int, **options: Any) -> Any:
    torch.manual_seed(3)
    model = Hooked()
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, accumulate_grad_batches=2, **options)
    trainer.fit(model, regression_data(7, num_ranks))
    fitted = model.losses, {name: weight.clone() for name, weight in model.state_dict().items()}
    return fitted, model.seen, model.calls


ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}


IN_TURNS: dict[str, Any] = {
    "round_robin1": {"stage": 1},
    "round_robin2": {"stage": 2},
    "round_robin2_offload": {"stage": 2, "offload_optimizer": "cpu"},
}
WITH_CPU_ADAM = pytest.param("round_robin2_offload", marks=pytest.mark.deepspeed_operators("cpu_adam"))


def fit_hooked_on_rank(strategy: str) -> Any:
    if strategy in IN_TURNS:
        return fit_hooked(2, strategy=ParalZeROStrategy(deepspeed_config=ROUND_ROBIN, **IN_TURNS[strategy]))
    return fit_hooked(2, strategy=strategy)


@pytest.mark.parametrize("strategy", [*WITH_OFFLOAD, "round_robin1", "round_robin2", WITH_CPU_ADAM])
def test_overridden_hooks_take_effect(on_ranks, strategy: str) -> None:
    tolerance = 1e-4 if "offload" in strategy else 1e-5
    expected_fit, expected_seen, expected_calls = fit_hooked(1)
    ranks = on_ranks(2, fit_hooked_on_rank, strategy)
    assert_same_fit([fitted for fitted, _, _ in ranks], expected_fit, tolerance)
    for _, seen, calls in ranks:
        assert calls == expected_calls
        torch.testing.assert_close(seen, expected_seen, rtol=1e-3 if "offload" in strategy else 1e-5, atol=tolerance)


# Evaluation, several runs, failures


class Failing(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)


def nvme_folder() -> Path:
    folder = Path(tempfile.gettempdir(), "lightning_paral_tests_nvme_empty")
    folder.mkdir(exist_ok=True)
    return folder


def fit_after_failure(strategy: str) -> Any:
    if strategy == "paral_zero3_nvme":
        os.environ["PARAL_NVME_PATH"] = str(nvme_folder())
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(max_epochs=1, devices=2, strategy=strategy).fit(Failing(), regression_data(5, 2))
    # Lightning sets the number of threads if it is not set yet.
    assert os.environ.keys() - before.keys() <= {"OMP_NUM_THREADS"}
    dist.barrier()
    return fit_regression(8, 1, 2, strategy=strategy)


@pytest.mark.parametrize("strategy", [*STAGES, "paral_zero3_nvme"])
def test_fit_after_a_failed_one(on_ranks, strategy: str) -> None:
    tolerance = 1e-4 if "nvme" in strategy else 1e-5
    assert_same_fit(on_ranks(2, fit_after_failure, strategy), fit_regression(8, 1, 1), tolerance)
    if strategy == "paral_zero3_nvme":
        assert list(nvme_folder().iterdir()) == []


# Memory and traffic, counted


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_traffic_per_step_equals_the_paper(on_ranks, stage: int, world_size: int) -> None:
    ranks = on_ranks(world_size, model_sizes_sent_per_step, stage)
    assert sum(ranks) / world_size == pytest.approx(model_sizes_by_formula(stage, world_size), rel=0.05)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_equals_the_paper(on_ranks, stage: int, world_size: int) -> None:
    for held in on_ranks(world_size, bytes_held, stage):
        for part, expected in bytes_by_formula(stage, world_size).items():
            assert held[part] == pytest.approx(expected, rel=0.05), part
