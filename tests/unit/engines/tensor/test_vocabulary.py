"""Embeddings and the cross-entropy of which each rank has a part equal whole ones, and communicate little."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_paral.engines.tensor.collectives import own_range
from lightning_paral.engines.tensor.split_tensor import SplitTensor
from lightning_paral.engines.tensor.vocabulary import local_padding_idx, own_rows_of_ids, rows_of_ids
from tests.unit.engines.tensor.logits import SIZES, OnRanks, counted, own, pair, split, targets

IGNORED = 1


def compare_losses(dtype: torch.dtype, autocast: bool) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    cases = itertools.product(SIZES, (False, True), (0.0, 0.3), ("mean", "sum", "none"), ("some", "all", "no"))
    for size, weighted, smoothing, reduction, ignored in cases:
        whole, local, logits = pair((6, size), dtype)
        target = targets(size, (6,))
        if ignored != "no":
            target[slice(2) if ignored == "some" else slice(None)] = -100
        weight = torch.rand(size, generator=torch.Generator().manual_seed(1)).to(dtype) + 0.1 if weighted else None
        criterion = nn.CrossEntropyLoss(weight, reduction=reduction, label_smoothing=smoothing)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, found = criterion(whole, target), criterion(logits, target)
        case = f"{size} {weighted} {smoothing} {reduction} {ignored}"
        assert type(found) is Tensor, case
        torch.testing.assert_close(
            found, expected, equal_nan=True, msg=lambda text, case=case: f"{case}: {text}", **tolerance
        )
        scale = torch.linspace(0.5, 2.0, found.numel(), dtype=found.dtype).reshape(found.shape)
        expected.backward(scale)
        found.backward(scale)
        torch.testing.assert_close(
            local.grad, own(whole.grad), msg=lambda text, case=case: f"{case}: {text}", **tolerance
        )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_cross_entropy_equals_that_of_whole_logits(
    on_ranks: OnRanks, world_size: int, dtype: torch.dtype, autocast: bool
) -> None:
    on_ranks(world_size, compare_losses, dtype, autocast)


def compare_more_losses() -> None:
    for size in SIZES:
        probabilities = torch.softmax(pair((4, size), seed=1)[0].detach(), -1)
        values = torch.randn(5, size, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 1000
        values[:, 0] = -torch.inf
        large = 1e4 + torch.tensor([[12.0, *range(size - 1)]])  # of which the loss is a small part
        for logits, target, change, options in (
            (pair((6, size)), targets(size, (6,)), Tensor.clone, {"ignore_index": IGNORED}),
            (pair((size,)), targets(size, ()), Tensor.clone, {}),
            (pair((size,)), targets(size, ()), Tensor.clone, {"reduction": "none"}),
            (pair((0, size)), targets(size, (0,)), Tensor.clone, {}),
            (pair((4, size)), probabilities, Tensor.clone, {}),  # gathered
            (pair((2, 3, size)), targets(size, (2, 3)), lambda x: x.transpose(1, 2), {}),
            (split(large), targets(1, (1,)), Tensor.clone, {}),
            (split(values), targets(size, (5,)).clamp(min=1), Tensor.clone, {}),
        ):
            whole, local, found_in = logits
            expected, found = (F.cross_entropy(change(x), target, **options) for x in (whole, found_in))
            torch.testing.assert_close(found, expected, equal_nan=True)
            expected.backward()
            found.backward()
            torch.testing.assert_close(local.grad, own(whole.grad))


def test_cross_entropy_of_unusual_logits(on_ranks: OnRanks) -> None:
    on_ranks(3, compare_more_losses)


def collectives_of_losses() -> list[str]:
    _, _, logits = pair((2, 4, 7))
    with counted() as calls:
        shifted = logits[:, :-1, :].contiguous().float()
        flat = shifted.view(-1, shifted.size(-1))
        assert type(flat) is SplitTensor
        F.cross_entropy(flat, targets(7, (6,))).backward()
    return calls


def test_cross_entropy_takes_two_small_all_reduces_forward_and_none_backward(on_ranks: OnRanks) -> None:
    assert on_ranks(2, collectives_of_losses) == [["max 6", "sum 12"]] * 2


def wrong_losses() -> None:
    _, _, logits = pair((4, 7))
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        F.cross_entropy(logits, torch.tensor([0, 1, 7, 2]))
    with pytest.raises(IndexError, match="Target -1 is out of bounds"):
        F.cross_entropy(logits, torch.tensor([0, 1, -1, 2]))
    with pytest.raises(RuntimeError, match="label_smoothing must be between"):
        F.cross_entropy(logits, targets(7, (4,)), label_smoothing=2.0)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(logits, targets(7, (5,)))


def test_wrong_arguments_of_cross_entropy_raise_the_errors_of_torch(on_ranks: OnRanks) -> None:
    on_ranks(2, wrong_losses)


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
