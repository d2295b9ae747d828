"""`divergence_check_every` names the first parameter whose replicas differ."""

import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral.distributed.divergence import checksum
from tests.contract.cases import BY_LABEL, labels
from tests.distributed.divergence.modules import Differing, fit

REPLICATED = [BY_LABEL[label] for label in ("paral_ddp", "paral_ddp_ring", "fsdp_hybrid", "paral_zero1", "paral_zero2")]


class Changing(Differing):
    """Changes one element of a weight on one rank after optimizer step 3."""

    def __init__(self, rank: int, value: float) -> None:
        super().__init__("", 0)
        self.changes = rank == 1
        self.value = value

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == 3 and self.changes:
            weight: Any = self.head.weight
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            with torch.no_grad():
                local.data[1, 2] = local.data[1, 2] + self.value


def fit_changing(strategy: str, num_ranks: int, value: float, every: int | None) -> str:
    module = Changing(int(os.environ["RANK"]), value)
    return fit(strategy, module, {"divergence_check_every": every}, devices=num_ranks, max_epochs=4)


FOUND = "After optimizer step 3 of this run, the values of `head.weight` differ between"


@pytest.mark.parametrize("value", [0.0, 1e-6])
@pytest.mark.parametrize("strategy", labels(REPLICATED))
def test_changed_weight_is_named_and_equal_replicas_pass(on_ranks: Any, strategy: str, value: float) -> None:
    for message in on_ranks(2, fit_changing, strategy, 2, value, 3):
        assert f"{FOUND} rank 0 and rank 1" in message if value else message == ""


def test_only_replicas_of_a_shard_are_compared(on_ranks: Any) -> None:
    for message in on_ranks(4, fit_changing, "fsdp_hybrid", 4, 1e-6, 3):
        assert f"{FOUND} rank 1 and rank 3" in message


def test_it_is_off_by_default(on_ranks: Any) -> None:
    assert on_ranks(2, fit_changing, "paral_ddp", 2, 1e-6, None) == ["", ""]


def test_fully_sharded_parameters_have_no_replicas(on_ranks: Any) -> None:
    assert on_ranks(2, warns_about_no_replicas, "paral_fsdp") == [True, False]


def warns_about_no_replicas(strategy: str) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fit(strategy, Differing("", 0), {"divergence_check_every": 1}) == ""
    return any("divergence_check_every=1 has no effect" in str(each.message) for each in caught)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.bool])
def test_checksum_depends_on_each_element_and_its_position(dtype: torch.dtype) -> None:
    base = torch.zeros(7, 3, dtype=dtype)
    sums = {int(checksum(base))}
    for position in range(base.numel()):
        changed: Tensor = base.clone()
        changed.view(-1)[position] = 1
        sums.add(int(checksum(changed)))
    assert len(sums) == 1 + base.numel()
    assert int(checksum(base.clone())) in sums


def test_checksum_of_large_and_of_empty_tensors() -> None:
    large = torch.arange(3 << 20, dtype=torch.float32)
    swapped = large.clone()
    swapped[[5, (2 << 20) + 5]] = large[[(2 << 20) + 5, 5]]
    assert int(checksum(large)) == int(checksum(large.view(3, -1)))
    assert int(checksum(large)) != int(checksum(swapped))
    assert int(checksum(torch.tensor(float("nan")))) == int(checksum(torch.tensor(float("nan"))))
    assert int(checksum(torch.zeros(0))) != int(checksum(torch.zeros(1)))
