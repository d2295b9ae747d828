"""The cross-entropy of split logits equals that of whole ones, and communicates a few numbers per row."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_paral.engines.tensor.logits import SplitLogits
from tests.unit.engines.tensor.logits import SIZES, OnRanks, counted, own, pair, targets

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
        # a class that is ignored, one sample without a batch, and an empty batch
        for shape, options in (((6,), {"ignore_index": IGNORED}), ((), {}), ((), {"reduction": "none"}), ((0,), {})):
            whole, local, logits = pair((*shape, size))
            expected = F.cross_entropy(whole, targets(size, shape), **options)
            found = F.cross_entropy(logits, targets(size, shape), **options)
            torch.testing.assert_close(found, expected, equal_nan=True)
            expected.backward()
            found.backward()
            torch.testing.assert_close(local.grad, own(whole.grad))
        # float64, large and infinite logits
        values = torch.randn(5, size, dtype=torch.float64) * 1000
        dist.broadcast(values, 0)
        values[:, 0] = -torch.inf
        whole, local = values.clone().requires_grad_(), own(values).clone().requires_grad_()
        target = targets(size, (5,)).clamp(min=1)
        expected = F.cross_entropy(whole, target)
        found = F.cross_entropy(SplitLogits.of(local, size, dist.group.WORLD), target)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
        expected.backward()
        found.backward()
        torch.testing.assert_close(local.grad, own(whole.grad), rtol=1e-10, atol=1e-14)


def test_cross_entropy_of_unusual_logits(on_ranks: OnRanks) -> None:
    on_ranks(3, compare_more_losses)


def collectives_of_losses() -> list[list[str]]:
    found = []
    for smoothing in (0.0, 0.1):
        _, _, logits = pair((2, 4, 7))
        with counted() as calls:
            shifted = logits[:, :-1, :].contiguous().float()
            flat = shifted.view(-1, shifted.size(-1))
            assert type(flat) is SplitLogits
            F.cross_entropy(flat, targets(7, (6,)), label_smoothing=smoothing).backward()
        found.append(calls)
    return found


def test_cross_entropy_takes_two_small_all_reduces_forward_and_none_backward(on_ranks: OnRanks) -> None:
    assert on_ranks(2, collectives_of_losses) == [[["max 6", "sum 12"], ["max 6", "sum 18"]]] * 2


def compare_gathered_losses() -> None:
    for size in SIZES:
        probabilities = torch.softmax(pair((4, size), seed=1)[0].detach(), -1)
        for shape, target, change in (
            ((4, size), probabilities, lambda logits: logits),
            ((2, 3, size), targets(size, (2, 3)), lambda logits: logits.transpose(1, 2)),
        ):
            whole, local, logits = pair(shape)
            expected, found = F.cross_entropy(change(whole), target), F.cross_entropy(change(logits), target)
            torch.testing.assert_close(found, expected)
            expected.backward()
            found.backward()
            torch.testing.assert_close(local.grad, own(whole.grad))


def test_cross_entropy_of_probabilities_or_of_another_dimension_is_gathered(on_ranks: OnRanks) -> None:
    on_ranks(3, compare_gathered_losses)


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
