"""The limit of `paral bench memory`, and what it says about strategies above it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_paral.diagnostics.bench.memory import MemoryResults, MemoryRow, check_memory
from lightning_paral.diagnostics.bench.memory_plan import KNOWN, Expected, Subject, expect, layout_of, saved_bytes
from lightning_paral.diagnostics.bench.resident import PeakMemory
from lightning_paral.diagnostics.bench.transformer import RandomTokenData, SmallTransformer
from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.following import FollowedSteps, follow_steps
from lightning_paral.planning.settings import StepSettings

MIB = 2**20


class WithoutStates(SmallTransformer):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def small(cls: type[SmallTransformer] = SmallTransformer) -> SmallTransformer:
    return cls(width=64, num_layers=3, context=32)


def batch() -> torch.Tensor:
    return next(iter(RandomTokenData(batch_size=4, context=32).train_dataloader()))


@pytest.fixture(scope="module")
def followed() -> FollowedSteps:
    return follow_steps(small(), batch(), StepSettings())


@pytest.mark.parametrize(
    ("name", "bytes_per_element"),
    [
        ("ddp", 16.0),
        ("paral_ddp", 16.0),
        ("paral_zero1", 4 + 4 + 8 / 4),
        ("deepspeed_stage_3", 16 / 4),
        ("raw_zero3", 16 / 4),
        ("paral_fsdp", 16 / 4),
        ("raw_fsdp", 16 / 4),
    ],
)
def test_formula_counts_weights_gradients_and_the_states_of_adam(
    followed: FollowedSteps, name: str, bytes_per_element: float
) -> None:
    found = expect(layout_of(name), followed.plain, followed.states, 4, StepSettings(), 1000, on_cpu=True)

    assert found.formula_bytes == pytest.approx(bytes_per_element * followed.states.num_params, rel=0.001)
    assert found.limit_bytes == pytest.approx(1.25 * found.formula_bytes + 1000, abs=2)
    assert found.is_sharded == (name not in ("ddp", "paral_ddp"))


def test_formula_counts_the_states_of_the_own_optimizer() -> None:
    followed = follow_steps(small(WithoutStates), batch(), StepSettings())

    found = expect(layout_of("paral_ddp"), followed.plain, followed.states, 2, StepSettings(), 0, on_cpu=True)

    assert found.formula_bytes == 8 * followed.states.num_params


def test_every_known_strategy_has_a_layout() -> None:
    assert {layout_of(name).engine for name in KNOWN} == {"ddp", "fsdp", "zero"}


def test_saved_activations_are_those_that_autograd_saves(followed: FollowedSteps) -> None:
    module = small()
    module.configure_model()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = module.training_step(batch(), 0)

    assert loss.requires_grad
    assert saved_bytes(followed.plain) == pytest.approx(sum(saved.values()), rel=0.05)


def test_peak_memory_counts_from_its_creation() -> None:
    freed = torch.ones(100 * MIB // 4)
    del freed
    peak = PeakMemory(torch.device("cpu"))
    assert peak.so_far() < 50 * MIB

    freed = torch.ones(60 * MIB // 4)
    del freed

    assert 58 * MIB <= peak.so_far() < 75 * MIB


ROW = MemoryRow(
    strategy="ddp",
    num_ranks=2,
    device="cpu",
    start_seconds=1.0,
    is_sharded=False,
    start_bytes=50,
    peak_bytes=100,
    formula_bytes=60,
    limit_bytes=90,
    planned_bytes=95,
)
OF_MODULE: dict[str, Any] = {"module": "GPT", "num_params": 1, "batch_size": 1, "unit_bytes": 1, "activation_bytes": 1}


def test_sharded_strategies_above_the_limit_or_ddp_are_named() -> None:
    sharded = replace(ROW, is_sharded=True)
    rows = (
        within := replace(sharded, strategy="paral_fsdp", peak_bytes=90),
        large := replace(sharded, strategy="paral_zero1", peak_bytes=91),
        larger := replace(sharded, strategy="paral_zero2", peak_bytes=101),
        replace(sharded, strategy="raw_fsdp", peak_bytes=1000),
        alone := replace(sharded, strategy="paral_zero3", num_ranks=4, peak_bytes=1000),
    )
    found = MemoryResults(**OF_MODULE, notes=(), rows=(ROW, *rows))

    assert found.above_limit() == [large, larger, alone]
    assert found.above_ddp() == [larger]
    assert within.planned_ratio == pytest.approx(95 / 90)


def test_strategies_that_need_more_memory_than_is_free_are_refused() -> None:
    expected = Expected(formula_bytes=1, limit_bytes=1, planned_bytes=10**15, is_sharded=False)
    by_ranks = {2: {"paral_fsdp": replace(expected, planned_bytes=1)}, 4: {"paral_ddp": expected}}

    with pytest.raises(ConfigurationError, match=r"paral_ddp on 4 ranks needs about .* of host memory, but .* free"):
        check_memory(Subject(**OF_MODULE, notes=(), expected=by_ranks))
