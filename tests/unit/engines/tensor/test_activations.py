"""Functions on activations and logits of which each rank has a part equal those on whole ones."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torchmetrics.functional import accuracy

from lightning_paral.engines.tensor import collectives, split_tensor
from lightning_paral.engines.tensor.collectives import Layout, exchange_rows, own_parts, own_range
from lightning_paral.engines.tensor.layers import SharedCopies
from lightning_paral.engines.tensor.split_tensor import SplitTensor
from lightning_paral.errors import ConfigurationError
from tests.unit.engines.tensor.logits import SIZES, OnRanks, Same, Square, counted

BATCH, LENGTH, HEADS, SIZE = 2, 3, 4, 6
WIDTH = HEADS * SIZE


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(shape: tuple[int, ...], layout: Layout) -> tuple[Tensor, Tensor, SplitTensor]:
    """Return the same activations twice: whole leaf, split leaf, split activations."""
    whole = values(*shape).requires_grad_()
    local = own_parts(whole.detach(), layout, dist.group.WORLD).clone().requires_grad_()
    return whole, local, SplitTensor.of(local, layout, dist.group.WORLD)


def heads(x: Tensor) -> Tensor:
    return x.view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2)


def rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    angles = values(LENGTH, SIZE, seed=3)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def as_complex(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = pairs * torch.polar(torch.ones(LENGTH, SIZE // 2, dtype=torch.float64), values(LENGTH, SIZE // 2))
    return torch.view_as_real(turned).flatten(3)


def changed_in_place(x: Tensor) -> Tensor:
    x = heads(x) * 1.0
    x += BIAS
    x.masked_fill_(MASK, -1.0)
    x[..., 1].mul_(2.0)
    return x.relu_()


def changed_before(use: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change activations in place, and drop the results: `use` gets the gradient behind the changes."""

    def changed(x: Tensor) -> Any:
        y = heads(x) * 1.0
        y.add_(BIAS)
        F.leaky_relu(y, 0.1, inplace=True)
        return use(y)

    return changed


def with_trained_bias(x: Tensor) -> Any:
    """Activations without a graph get one."""
    y = x.detach() * 1.0
    y += values(WIDTH, seed=6).requires_grad_()
    return Square.apply(y) + x


def in_half(x: Tensor) -> Tensor:
    """Queries and keys in another dtype than values, as by rotary embeddings under autocast."""
    x = heads(x).bfloat16()
    turned = x * values(LENGTH, SIZE).float()
    with torch.autocast("cpu", torch.bfloat16):
        scores = (x @ x.mT).softmax(-1, dtype=torch.float32)
        return F.scaled_dot_product_attention(turned, turned, x) + scores @ x


def grouped(x: Tensor) -> Tensor:
    """Fewer heads of keys than of queries, of which each rank has some as well."""
    keys = heads(x)
    return F.scaled_dot_product_attention(keys.repeat_interleave(2, dim=1), keys, keys, enable_gqa=True)


class Pair(NamedTuple):
    first: Any
    second: Any


BIAS, MASK = values(1, HEADS, LENGTH, SIZE, seed=1), values(LENGTH, SIZE, seed=2) > 0.5
MATRIX = values(SIZE, 5, seed=4)
KEYS = values(BATCH, HEADS, LENGTH, SIZE, seed=7)
POSITIONS = values(1, HEADS, LENGTH, LENGTH, seed=5)

ON_HEADS: dict[str, Callable[[Any], Any]] = {
    "view": heads,
    "view back": lambda x: heads(x).transpose(1, 2).reshape(BATCH, LENGTH, -1),
    "unflatten": lambda x: x.unflatten(-1, (HEADS, -1)).flatten(2),
    "shape": lambda x: x * x.shape[-1] + x.size(1) + len(x) + x.numel(),
    "permute": lambda x: x.view(BATCH, LENGTH, HEADS, SIZE).permute(2, 0, 1, 3).movedim(0, -2),
    "squeeze": lambda x: heads(x)[:, :, :1].squeeze(2).unsqueeze(0).squeeze(),
    "index": lambda x: heads(x)[:, :, None, -1][0, ..., ::2],
    "unbind": lambda x: sum(heads(x).unbind(2)),
    "split": lambda x: torch.stack([a * b for a, b in zip(*[heads(x).split(3, -1)] * 2, strict=True)], 1),
    "cat": lambda x: torch.cat([heads(x), heads(x) * 2], dim=2),
    "expand": lambda x: heads(x)[:, :, None].expand(-1, HEADS, 2, -1, SIZE).reshape(BATCH, 2 * HEADS, LENGTH, SIZE),
    "repeat": lambda x: heads(x).repeat_interleave(2, dim=1).repeat(2, 1, 1, 1),
    "rotary": lambda x: rotated(heads(x)),
    "complex": lambda x: as_complex(heads(x)),
    "bias": lambda x: heads(x) + BIAS,
    "bias twice": lambda x: torch.addcmul(heads(x), BIAS, BIAS),
    "mask": lambda x: torch.where(MASK, heads(x), 0.5).masked_fill(~MASK, 0.25),
    "number": lambda x: (2 - heads(x) / 3) ** 2,
    "softmax": lambda x: heads(x).softmax(-1) + F.softmax(heads(x), dim=2),
    "sum": lambda x: heads(x).sum(-1) + heads(x).mean((0, 3)) + heads(x).amax(dim=-1, keepdim=True).squeeze(-1),
    "norm": lambda x: F.layer_norm(heads(x), (SIZE,), values(SIZE), values(SIZE, seed=1)),
    "matmul": lambda x: heads(x) @ heads(x).transpose(-2, -1),
    "matmul whole": lambda x: heads(x) @ MATRIX,
    "einsum": lambda x: torch.einsum("bhld, bhmd -> bhlm", heads(x), heads(x)),
    "einsum whole": lambda x: torch.einsum("blhd,de,xhlm->bmhe", x.view(BATCH, LENGTH, HEADS, SIZE), MATRIX, POSITIONS),
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True),
    "attention with mask": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), POSITIONS, scale=0.1),
    "grouped heads": grouped,
    "whole keys": lambda x: F.scaled_dot_product_attention(heads(x), KEYS, KEYS, enable_gqa=True),
    "dtypes": in_half,
    "dtype of another": lambda x: (x.float().type_as(x) * 2).to(x[:, :1]) + BIAS.new_ones(()).to(x),
    "new dimension at the end": lambda x: x[..., None] * values(5),
    "rows of a batch of one": lambda x: torch.stack([row * 2 for row in x[:1]]),
    "expand by name": lambda x: x[:, :1].expand(size=(BATCH, 7, WIDTH)),
    "transposed": lambda x: x[0].t() * 2,
    "in place": changed_in_place,
    "in place, then dropped": changed_before(lambda y: y * 2),
    "in place, then dropped, then an own function": changed_before(Square.apply),
    "in place, then dropped, then two own functions": changed_before(lambda y: Same.apply(y) + Square.apply(y * y)),
    "in place, with a graph": with_trained_bias,
    **{
        f"{each.__name__} in place": lambda x, each=each: each(heads(x) * 1.0, inplace=True)
        for each in (F.relu6, F.selu, F.elu, F.celu, F.silu, F.hardswish, F.hardsigmoid, F.hardtanh, F.mish)
    },
    "in place, then own functions": lambda x: Square.apply(Same.apply(heads(x * 1.0).add_(BIAS).relu_())),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(lambda y: heads(y).exp(), x, use_reentrant=False),
}
"""Functions that need no collective in the forward pass."""

ON_SEGMENTS: dict[str, Callable[[Any], Any]] = {
    "chunk": lambda x: [F.scaled_dot_product_attention(*map(heads, x.chunk(3, dim=-1)))],
    "split": lambda x: [torch.stack([heads(each) for each in x.split(WIDTH, -1)], 0)],
    "view": lambda x: list(x.view(BATCH, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)),
    "index": lambda x: [x[..., :WIDTH] * x[..., WIDTH : 2 * WIDTH] * x.narrow(-1, 2 * WIDTH, WIDTH)],
}

NEEDS_ALL: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: heads(x).softmax(1),
    "mean": lambda x: x.mean(),
    "sum": lambda x: heads(x).sum(1),
    "one head": lambda x: heads(x)[:, 1],
    "matmul": lambda x: x @ values(WIDTH, 2),
    "sum of another": lambda x: torch.einsum("blv,blw->blv", values(BATCH, LENGTH, WIDTH), x),
    "flip": lambda x: heads(x).flip(1),
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "attention of positions": lambda x: F.scaled_dot_product_attention(*[heads(x).transpose(1, 2)] * 3, is_causal=True),
    "triangle": lambda x: heads(x).tril(),
    "repeat": lambda x: heads(x).repeat(1, 2, 1, 1),
    "repeat flat": lambda x: x.repeat_interleave(2),
    "fewer keys": lambda x: F.scaled_dot_product_attention(heads(x), KEYS[:, :2], KEYS[:, :2], enable_gqa=True),
    "rows": lambda x: x.flatten().mean(),
    "merged heads": lambda x: heads(x).reshape(BATCH * HEADS, LENGTH, SIZE).softmax(0),
    "many": lambda x: torch.stack([x, *[values(*x.shape, seed=seed) for seed in range(12)]]),
    "some features": lambda x: x[..., [0, 1, 2]] if x.ndim > 3 else x[0, 0][[0, 1, 2]],
}


ON_CLASSES: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda x: x.flatten(0, 1),
    "view": lambda x: x.view(-1, x.size(-1)),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "double": lambda x: x.double(),
    "to": lambda x: x.to(torch.float32),
    "contiguous": lambda x: x[:, :-1].contiguous(),
    "all but the last": lambda x: x[:, :-1, :],
    "one position": lambda x: x[:, -1],
    "new dimension": lambda x: x[:, None],
    "permute": lambda x: x.permute(1, 0, 2),
    "scale": lambda x: 2 * x / 0.7 * 3,
    "concatenated": lambda x: torch.cat([x, x]),
    "masked": lambda x: x.masked_fill(torch.ones_like(x) > 2, 0.0),
    "last transposed": lambda x: x.transpose(-1, 0) + 0,
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
}
"""Functions of logits, of which ranks may have different numbers of classes."""

NEEDS_ALL_CLASSES: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "mask": lambda x: x[torch.tensor([[True, False, True], [False, True, True]])],
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "softmax": lambda x: x.softmax(-1),
    "topk": lambda x: torch.topk(x, 2).values,
    "mean": lambda x: x.mean(),
    "sum of products": lambda x: (x * x).sum(-1),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), torch.full_like(x, 0.5), reduction="sum"),
    "nll_loss": lambda x: F.nll_loss(F.log_softmax(x.view(-1, x.shape[-1]), -1), torch.zeros(6, dtype=torch.long)),
    "class": lambda x: x[..., 1],
    "some classes": lambda x: x[..., :-1],
    "as a number": lambda x: x[0, 0, 0] * float(x[0, 0, 1].detach()),
    "in numpy": lambda x: torch.from_numpy(x.detach().numpy()).clone(),
    "max": lambda x: x.max(dim=-1)[0],
    "einsum": lambda x: torch.einsum("btv,btv->bt", x, x),
    "accuracy": lambda x: accuracy(
        x.detach().view(-1, x.shape[-1]), torch.zeros(6, dtype=torch.long), task="multiclass", num_classes=x.shape[-1]
    ),
}


def compare(function: Callable[[Any], Any], layout: Layout, shape: tuple[int, ...]) -> list[str]:
    """Compare values and gradients with whole activations, and return the collectives of the forward pass."""
    whole, local, split = pair(shape, layout)
    expected = function(whole)
    with counted() as calls:
        found = function(split)
        communicated = list(calls)
    expected, found = ([each] if isinstance(each, Tensor) else each for each in (expected, found))
    for one, other in zip(expected, found, strict=True):
        assert (other.shape, other.dtype, other.requires_grad) == (one.shape, one.dtype, one.requires_grad)
        full = other.full() if isinstance(other, SplitTensor) else other
        torch.testing.assert_close(full, one)
    if not expected[0].requires_grad:
        return communicated
    weights = [values(*each.shape, seed=9) for each in expected]
    sum((each.double() * weight).sum() for each, weight in zip(expected, weights, strict=True)).backward()
    sum((each.double() * weight).sum() for each, weight in zip(found, weights, strict=True)).backward()
    torch.testing.assert_close(local.grad, own_parts(whole.grad, layout, dist.group.WORLD))
    return communicated


def compare_heads() -> None:
    for name, function in ON_HEADS.items():
        assert compare(function, Layout(2, (WIDTH,)), (BATCH, LENGTH, WIDTH)) == [], name


def compare_segments() -> None:
    for name, function in ON_SEGMENTS.items():
        assert compare(function, Layout(2, (WIDTH,) * 3), (BATCH, LENGTH, 3 * WIDTH)) == [], name


def compare_gathered() -> None:
    for name, function in NEEDS_ALL.items():
        assert len(compare(function, Layout(2, (WIDTH,)), (BATCH, LENGTH, WIDTH))) == 1, name
    for name, function in ON_SEGMENTS.items():  # consecutive features are not the heads of three tensors
        assert compare(function, Layout(2, (3 * WIDTH,)), (BATCH, LENGTH, 3 * WIDTH)), name


def compare_classes() -> None:
    for size in SIZES:
        for name, function in (ON_CLASSES | NEEDS_ALL_CLASSES).items():
            assert (compare(function, Layout(2, (size,)), (2, 3, size)) == []) == (name in ON_CLASSES), name


def compare_gathered_twice() -> None:
    shape = (WIDTH, WIDTH)
    for function in (lambda x: torch.cat(Pair(x, x * 2), dim=-1), lambda x: x[(x[0] * 0).to(torch.long)]):
        assert len(compare(function, Layout(1, (WIDTH,)), shape)) == 2


def derivative(x: Tensor) -> Tensor:
    """The derivative of activations by an ordinary tensor."""
    by = values(WIDTH, seed=8).requires_grad_()
    product = x * by
    return torch.autograd.grad(product, by, torch.ones_like(product), create_graph=True)[0]


def compare_derivatives() -> None:
    compare(derivative, Layout(1, (WIDTH,)), (BATCH, WIDTH))


def compare_viewed_as_one_row() -> None:
    """The place of each element is not listed, which would take more memory than the elements."""
    collectives._order.cache_clear()
    compare(lambda x: x.flatten().softmax(0), Layout(2, (WIDTH,)), (BATCH, LENGTH, WIDTH))
    assert collectives._order.cache_info().currsize == 0


def compare_exchanged() -> None:
    segments = (8, 4, 4)
    for dtype in (torch.float32, torch.bfloat16):
        full = torch.arange(48).view(16, 3).to(dtype)
        rows = full[own_range(16, dist.group.WORLD)].clone().requires_grad_()
        for context in (torch.inference_mode(), torch.enable_grad()):  # what is known serves both
            with context:
                found = exchange_rows(rows, segments, dist.group.WORLD)
        assert torch.equal(found, own_parts(full, Layout(0, segments), dist.group.WORLD))
        found.backward(found.detach())
        assert torch.equal(rows.grad, rows)


def compare_copies() -> None:
    """Copies for layers whose input is split before the features, also into unequal parts."""
    for shape, layout in (((2, 8, 3), Layout(1, (8,))), ((2, 7, 3), Layout(1, (7,))), ((8, 3), Layout(0, (4, 4)))):
        whole, local, split = pair(shape, layout)
        copied = SharedCopies(dist.group.WORLD).of(split)
        assert torch.equal(copied, whole)
        (copied * values(*shape, seed=1)).sum().backward()
        gradient = values(*shape, seed=1) * dist.get_world_size()  # of all ranks
        torch.testing.assert_close(local.grad, own_parts(gradient, layout, dist.group.WORLD))


def zero_view_before(use: Callable[[SplitTensor], Any]) -> Callable[[SplitTensor], Any]:
    def write(x: SplitTensor) -> Any:
        x[..., :5].zero_()
        return use(x)

    return write


def in_cpp(write: Callable[[SplitTensor], Any]) -> Callable[[SplitTensor], Any]:
    def write_below_python(x: SplitTensor) -> Any:
        with torch.DisableTorchFunctionSubclass():
            return write(x)

    return write_below_python


CHANGED: dict[str, Callable[[SplitTensor], Any]] = {
    "before a layer": zero_view_before(lambda x: x.local),
    "of the same": lambda x: (x.contiguous()[..., :5].zero_(), x * 2),
    "of the result in place": lambda x: (F.relu(x, inplace=True)[..., :5].zero_(), x * 2),
    "by index": lambda x: x.__setitem__((..., 0), 1.0),
    "of a view": lambda x: (heads(x)[:, 1].zero_(), x * 2),
    "after a view": lambda x: (x[..., :5], x.add_(1.0)),
    "by an operation in C++": in_cpp(lambda x: x.add_(1.0)),
    "as the result of an operation in C++": in_cpp(lambda x: torch.add(torch.ones(x.shape, dtype=x.dtype), 1.0, out=x)),
    "of a list": in_cpp(lambda x: torch._foreach_add_([x], 1.0)),
}


def errors_of_changes() -> None:
    for name, function in CHANGED.items():
        x = pair((BATCH, LENGTH, WIDTH), Layout(2, (WIDTH,)))[2].detach()
        with pytest.raises(ConfigurationError, match="cannot be changed in place"):
            [function(x), pytest.fail(name)]
    x = pair((BATCH, LENGTH, WIDTH), Layout(2, (WIDTH,)))[2]
    for words, refused in (
        ("have no gradient for retain_grad", lambda: x.retain_grad()),
        ("have no gradient for grad", lambda: torch.autograd.grad(x.sum(), x)),
    ):
        with pytest.raises(ConfigurationError, match=words):
            refused()


def attributes_of_logits() -> None:
    """What is known without other ranks' parts needs no collective."""
    logits = pair((2, 3, 7), Layout(2, (7,)))[2]
    with counted() as calls:
        str(logits), f"{logits}", logits.requires_grad, logits.is_cuda, len(logits), hash(logits), dir(logits)
    assert calls == []


def gathers() -> list[list[str]]:
    found = []
    _, _, logits = pair((3, 7), Layout(1, (7,)))
    with counted() as calls:
        logits.softmax(-1), logits.argmax(-1)
        with torch.no_grad():
            logits.topk(2)
    found.append(calls)
    _, local, logits = pair((3, 7), Layout(1, (7,)))
    with counted() as calls:
        with torch.no_grad():
            assert not logits.softmax(-1).requires_grad
        logits.exp().sum().backward()
    found.append(calls)
    torch.testing.assert_close(local.grad, local.detach().exp())
    return found


def test_gathers_once_and_again_if_only_the_first_has_no_graph(on_ranks: OnRanks) -> None:
    assert on_ranks(2, gathers) == [[["gather 24"], ["gather 24"] * 2]] * 2


def learned() -> list[list[int]]:
    found: list[list[int]] = []
    for function in (
        lambda x: x.chunk(6, dim=-1),
        lambda x: x.split([8, 16], dim=-1),
        lambda x: x.view(BATCH, LENGTH, 3, 2, -1),
        lambda x: x[..., 8:],
    ):
        x = pair((BATCH, LENGTH, WIDTH), Layout(2, (WIDTH,)))[2].detach()
        x.learn = lambda cuts: found.append(sorted(cuts))
        function(x)
    return found


def test_layers_learn_where_code_cuts_their_features(on_ranks: OnRanks) -> None:
    assert on_ranks(2, learned) == [[[4, 8, 12, 16, 20], [8], [8, 16], [8]]] * 2


def forgets() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_tensor, "_MAX_KNOWN", 1)
        x = pair((BATCH, LENGTH, WIDTH), Layout(2, (WIDTH,)))[2]
        x.exp(), x.tanh()
    assert Tensor.tanh in {key[0] for key in split_tensor._known}


@pytest.mark.parametrize(
    "run",
    [
        forgets,
        errors_of_changes,
        compare_copies,
        compare_viewed_as_one_row,
        compare_gathered_twice,
        compare_derivatives,
        attributes_of_logits,
    ],
)
def test_on_two_ranks(on_ranks: OnRanks, run: Any) -> None:
    on_ranks(2, run)


@pytest.mark.parametrize(
    ("compared", "world_size"),
    [
        *(
            (run, size)
            for run in (compare_heads, compare_segments, compare_gathered, compare_exchanged)
            for size in (2, 4)
        ),
        *((compare_classes, size) for size in (2, 3)),
    ],
)
def test_functions_equal_those_on_whole_activations(on_ranks: OnRanks, compared: Any, world_size: int) -> None:
    on_ranks(world_size, compared)
