"""Staged copies for a background save have the right contents and take little memory."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Parameter

from lightning_paral.checkpoint.io import staging as module_under_test
from lightning_paral.checkpoint.io.arena import ALIGNMENT
from lightning_paral.checkpoint.io.staging import Staging, copy_to_host
from lightning_paral.checkpoint.layout import full_chunk
from lightning_paral.checkpoint.save_plan import WriteItem
from lightning_paral.checkpoint.shards import LocalShard, flat, identity

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def entry_of(value: Tensor, dtype: torch.dtype | None = None) -> WriteItem:
    shard = LocalShard((full_chunk(value.shape),), partial(identity, flat(value)))
    return WriteItem(("state_dict", "x"), tuple(value.shape), dtype or value.dtype, shard)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def test_tensors_of_all_dtypes_are_copied_side_by_side_and_aligned() -> None:
    originals = [values((3, number + 1), dtype) for number, dtype in enumerate(DTYPES)]
    entries = [entry_of(value) for value in originals]
    expected = [value.clone() for value in originals]
    staging = Staging()

    staging.stage(entries)
    for value in originals:
        value.zero_()

    staged = [entry.shard.values() for entry in entries]
    for copy, value in zip(staged, expected, strict=True):
        assert copy.dtype == value.dtype
        assert torch.equal(copy.view(torch.uint8), flat(value).view(torch.uint8))
        assert copy.data_ptr() % ALIGNMENT == 0
    assert len({copy.untyped_storage().data_ptr() for copy in staged}) == 1
    assert staging.arena.nbytes <= sum(copy.nbytes for copy in staged) + ALIGNMENT * len(staged)


@pytest.fixture
def all_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every tensor as if it were on another device."""
    monkeypatch.setattr(module_under_test._DeepcopyToHost, "needs_copy", lambda _, tensor: True)


class Anything:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_host_copies_equal_deepcopy(all_elsewhere: None) -> None:
    base = torch.arange(12.0).view(3, 4)
    base.note = ["an attribute", base]  # type: ignore[attr-defined]
    parameter = Parameter(torch.ones(2), requires_grad=False)
    tree: dict[str, Any] = {
        "base": base,
        "again": [base],
        "view": base.t()[1:],
        "object": Anything(base[0]),
        "parameter": parameter,
        "module": Linear(2, 3),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "leaf": torch.zeros(2, requires_grad=True),
    }

    copy = copy_to_host(tree)

    assert copy["base"] is copy["again"][0]
    assert copy["base"].note[1] is copy["base"]
    assert copy["view"].stride() == tree["view"].stride()
    assert type(copy["parameter"]) is Parameter
    assert not copy["parameter"].requires_grad
    assert copy["leaf"].requires_grad
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(copy["conjugate"], tree["conjugate"])
    assert torch.equal(copy["module"].weight, tree["module"].weight)
    base.zero_()  # the copies share memory with each other, but not with the original
    assert torch.equal(copy["base"], torch.arange(12.0).view(3, 4))
    assert torch.equal(copy["view"], copy["base"].t()[1:])
