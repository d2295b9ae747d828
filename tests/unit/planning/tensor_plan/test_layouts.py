"""What following a step proves about code that divides features into heads, or into several tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral.planning.tensor_plan.make import make_plan
from lightning_paral.planning.tensor_plan.observations import Observations
from lightning_paral.planning.tensor_plan.trace import plan_by_dataflow
from tests.unit.planning.tensor_plan.models import Step

HEADS, SIZE = 4, 4


class Attention(Step):
    """Four layers, with code between them that tests give."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, HEADS * SIZE) for _ in range(3))
        self.mix = nn.Linear(HEADS, HEADS)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.down(self.between(self, q, k, v).transpose(1, 2).flatten(2))


def followed(module: Any, num_ranks: int = 2, batch: Tensor | None = None) -> Observations:
    module.log = lambda *_, **__: None
    step = torch.randn(2, 3, 8) if batch is None else batch
    return plan_by_dataflow(module, lambda: module.training_step(step, 0), num_ranks)


def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def test_an_attention_is_split_by_heads() -> None:
    module = Attention(attend)

    found = followed(module)

    [chain] = found.chains
    assert (set(chain.opening), chain.closing) == ({"q", "k", "v"}, ("down",))
    assert chain.segments == ((16,),) * 3
    splits = make_plan(module, 2, found, {"q": "colwise", "k": "colwise", "v": "colwise", "down": "rowwise"}).splits
    assert not any(splits[name].gathers_output for name in "qkv")
    assert not splits["down"].splits_input


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda m, q, k, v: (q @ k.mT).softmax(1) @ v, "softmax"),
        (lambda m, q, k, v: attend(m, q, k, v) + q.mean(), "mean"),
        (lambda m, q, k, v: attend(m, q, k, v.flip(1)), "flip"),
        (lambda m, q, k, v: attend(m, q, k[:, :1], v), "getitem"),
        (
            lambda m, q, k, v: attend(m, q, m.mix(k.permute(0, 2, 3, 1)[..., [0, 2, 1, 3]]).permute(0, 3, 1, 2), v),
            "getitem",
        ),
        (lambda m, q, k, v: (m.kept.append(q @ k.mT), attend(m, q, k, v))[1], "kept after"),
        (lambda m, q, k, v: attend(m, q, k.transpose(1, 2).reshape(2, 3, 2, 8).transpose(1, 2), v), "matmul"),
        (lambda m, q, k, v: attend(m, q, k, v).contiguous().numpy() * q, "cannot be followed"),
    ],
)
def test_a_use_of_all_heads_is_noticed(between: Any, reason: str) -> None:
    found = followed(Attention(between))

    assert not any({"q", "k", "v"} <= set(chain.opening) for chain in found.chains)
    assert reason in " ".join([found.reason or "", *found.leaks.values()])


def test_ranks_that_do_not_divide_the_heads_gather() -> None:
    found = followed(Attention(attend), num_ranks=8)

    assert found.chains == ()
    assert found.leaks["q"] == "its output is used by view"
