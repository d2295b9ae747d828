"""Buffers and frozen parameters of dtypes that gloo does not support are broadcast, or refused."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_paral import ConfigurationError
from lightning_paral.strategies.ddp import _check_dtypes
from tests.models.regression import Regression, fit, regression_data
from tests.running import assert_same_fit, quiet_trainer

DTYPES = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.int8,
    torch.bool, torch.bfloat16, torch.float64, torch.complex32, torch.complex64,
]  # fmt: skip


class OfManyDtypes(Regression):
    def __init__(self, of_rank: int, frozen: bool) -> None:
        super().__init__()
        self.register_buffer("buffer_strided", torch.arange(8.0).add(of_rank).view(2, 4).t())
        for number, dtype in enumerate(DTYPES):
            values = torch.arange(8).add(of_rank).remainder(2).to(dtype)
            self.register_buffer(f"buffer_{number}", values)
            self.register_buffer(f"scalar_{number}", values[0].clone())
            if frozen:
                self.register_parameter(f"frozen_{number}", nn.Parameter(values.clone(), requires_grad=False))


def bits(value: Tensor) -> list[int]:
    return value.reshape(-1).view(torch.uint8).tolist()


def after_fit(strategy: str, frozen: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    module = OfManyDtypes(dist.get_rank(), frozen)
    quiet_trainer(max_steps=2, devices=dist.get_world_size(), strategy=strategy).fit(module, regression_data(2, 2))
    rare = ("buffer", "scalar", "frozen")
    return {key: value.detach().clone() for key, value in module.state_dict().items() if key.startswith(rare)}


@pytest.mark.parametrize(
    ("strategy", "frozen"),
    [("paral_fsdp", True), ("paral_zero2", False), ("paral_zero3", False)],
)
def test_all_ranks_get_the_values_of_rank_zero(on_ranks, strategy: str, frozen: bool) -> None:
    expected = OfManyDtypes(0, frozen).state_dict()
    for found in on_ranks(2, after_fit, strategy, frozen):
        assert len(found) == (3 if frozen else 2) * len(DTYPES) + 1
        for key, value in found.items():
            assert value.dtype == expected[key].dtype, key
            assert bits(value) == bits(expected[key]), key


@pytest.mark.parametrize("backend", ["gloo", "NCCL"])
def test_dtypes_are_refused_that_the_backend_cannot_broadcast(backend: str) -> None:
    refused = set()
    for dtype in DTYPES:
        module = nn.Module()
        module.register_buffer("buffer", torch.zeros(2).to(dtype))
        try:
            _check_dtypes(module, backend)
        except ConfigurationError:
            refused.add(dtype)
    over_both = {torch.int16, torch.uint16, torch.uint32, torch.uint64}
    assert refused == over_both | ({torch.float8_e4m3fn, torch.float8_e5m2} if backend == "gloo" else set())


def test_ddp_refuses_what_gloo_cannot_broadcast(on_ranks) -> None:
    with pytest.raises(Exception, match=r"buffer_0 has dtype float8_e4m3fn, which gloo"):
        on_ranks(2, after_fit, "paral_ddp", False)


class FrozenFirst(Regression):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)


def fit_after_frozen(num_ranks: int, strategy: str, dtype: torch.dtype) -> Any:
    return fit(partial(FrozenFirst, dtype), 2, num_ranks, strategy=strategy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32])
def test_gradients_are_not_exchanged_in_the_dtype_of_a_frozen_parameter(on_ranks, dtype: torch.dtype) -> None:
    assert_same_fit(on_ranks(2, fit_after_frozen, 2, "paral_zero2", dtype), fit_after_frozen(1, "auto", dtype))
