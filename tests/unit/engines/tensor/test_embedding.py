"""Embeddings of which each rank has some of the rows equal whole ones."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lightning_paral.engines.tensor.collectives import own_range
from lightning_paral.engines.tensor.vocabulary import local_padding_idx, own_rows_of_ids, rows_of_ids
from tests.unit.engines.tensor.logits import SIZES, OnRanks, targets


def compare_embeddings(padding_idx: int | None, dtype: torch.dtype) -> None:
    for size in SIZES:
        whole = nn.Embedding(size, 4, padding_idx, dtype=dtype)
        dist.broadcast(whole.weight.data, 0)
        rows = own_range(size, dist.group.WORLD)
        weight = whole.weight.detach()[rows].clone().requires_grad_()
        for shape in ((3, 5), (), (0,)):
            ids = targets(size, shape)
            whole.weight.grad = weight.grad = None
            expected = whole(ids)
            local_ids, is_elsewhere = own_rows_of_ids(ids, rows, size)
            found = F.embedding(local_ids, weight, local_padding_idx(padding_idx, rows))
            found = rows_of_ids(found, is_elsewhere, dist.group.WORLD)
            assert torch.equal(found, expected)
            scale = torch.arange(expected.numel(), dtype=dtype).reshape(expected.shape)
            (expected * scale).sum().backward()
            (found * scale).sum().backward()
            assert torch.equal(weight.grad, whole.weight.grad[rows])
        for wrong in (-1, size):
            with pytest.raises(IndexError, match=f"index {wrong} is out of range for an embedding with {size} rows"):
                own_rows_of_ids(torch.tensor([0, wrong]), rows, size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("padding_idx", [None, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_equal_those_of_all_rows(
    on_ranks: OnRanks, world_size: int, padding_idx: int | None, dtype: torch.dtype
) -> None:
    on_ranks(world_size, compare_embeddings, padding_idx, dtype)
