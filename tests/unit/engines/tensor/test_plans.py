"""The plans that are made for a module, by themselves and from what users write."""

import re
from typing import Any

import pytest
import yaml
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm

from lightning_paral import ConfigurationError
from lightning_paral.engines.tensor.plan import TensorPlan, make_plan
from lightning_paral.engines.tensor.shapes import layers_of, plain_chains
from tests.models.planned import gpt


class Block(nn.Module):
    """A feed-forward network with a norm."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.relu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Embeds tokens and predicts classes; the weight of the head is that of the embedding if `is_tied`."""

    def __init__(self, num_classes: int = 301, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.between = nn.Linear(64, 64)
        self.head = nn.Linear(64, num_classes, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight


BLOCKS = {f"blocks.{n}.{name}": style for n in range(2) for name, style in (("up", "colwise"), ("down", "rowwise"))}


def written(plan: TensorPlan) -> dict[str, str]:
    """Return each layer that is split, with its style."""
    return dict(plan.splits)


@pytest.mark.parametrize("is_tied", [False, True])
def test_plain_shapes_and_the_vocabulary_are_split(is_tied: bool) -> None:
    plan = make_plan(Classifier(is_tied=is_tied), 2)

    assert written(plan) == {"embedding": "vocab", **BLOCKS, "head": "vocab"}
    assert plan.whole == {"between": "it is in no feed-forward network or attention of a plain shape"}


def test_examples_gpt() -> None:
    plan = make_plan(gpt(num_layers=1), 2)

    assert written(plan) == {
        "byte_embedding": "vocab",
        "blocks.0.query_key_value": "colwise",
        "blocks.0.attention_out": "rowwise",
        "blocks.0.feed_forward.1": "colwise",
        "blocks.0.feed_forward.3": "rowwise",
        "head": "vocab",
    }
    assert plan.whole == {"position_embedding": "it has only 64 rows"}


@pytest.mark.parametrize(
    ("sizes", "chains"),
    [
        ([(8, 32), (32, 8)], ["01"]),
        ([(8, 8), (8, 8)], ["01"]),
        ([(8, 64), (32, 8)], ["01"]),  # with a gate
        ([(8, 32), (8, 32), (32, 8)], ["012"]),
        ([(8, 24), (8, 8)], ["01"]),
        ([(8, 16), (8, 8)], ["01"]),  # fewer keys and values
        ([(8, 8), (8, 8), (8, 8), (8, 8)], ["0123"]),
        ([(8, 16), (8, 4), (8, 4), (16, 8)], ["0123"]),
        ([(8, 8), (6, 8), (6, 8), (8, 8)], ["0123"]),  # keys and values of another input
        ([(8, 8), (8, 16), (8, 8)], ["012"]),  # queries; keys and values
        ([(8, 8), (8, 8), (8, 8), (8, 8), (8, 32), (32, 8)], ["0123", "45"]),
        ([(4, 8), (8, 32), (32, 8), (8, 3)], ["12"]),
        ([(8, 8), (8, 8), (8, 8)], []),  # queries, keys and values?
        ([(8, 32), (32, 32), (32, 8)], []),
        ([(8, 32), (32, 8), (8, 32)], ["01"]),
        ([(8, 20), (8, 8)], []),
    ],
    ids=str,
)
def test_plain_shapes(sizes: list[tuple[int, int]], chains: list[str]) -> None:
    module = nn.Sequential(*(nn.Linear(*each) for each in sizes))

    found = plain_chains(module, layers_of(module))

    assert ["".join(chain) for chain in found] == chains
    assert all([*chain.values()].index("rowwise") == len(chain) - 1 for chain in found)


def test_shapes_of_nested_modules() -> None:
    inner = nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkv"})
    attention = nn.ModuleDict({"inner": nn.Sequential(*inner.values()), "out": nn.Sequential(nn.Linear(8, 8))})
    module = nn.Sequential(nn.Sequential(*attention.values()), nn.Linear(8, 8))

    (chain,) = plain_chains(module, layers_of(module))

    assert [*chain] == ["0.0.0", "0.0.1", "0.0.2", "0.1.0"]


def test_the_gate_of_llama_is_behind_the_layer_that_leads_back() -> None:
    module = nn.Module()
    module.w1, module.w2, module.w3 = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 32)

    (chain,) = plain_chains(module, layers_of(module))

    assert chain == {"w1": "colwise", "w3": "colwise", "w2": "rowwise"}


def test_only_the_vocabulary_is_uneven() -> None:
    plan = make_plan(Classifier(), 3)

    assert written(plan) == {"embedding": "vocab", "head": "vocab"}
    assert plan.whole["blocks.0.up"] == "3 ranks do not divide its 128 output features"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.embedding, "max_norm", 1.0), "max_norm=1.0"),
        (lambda m: parametrizations.weight_norm(m.blocks[0].up), "computed from other parameters"),
        (lambda m: m.blocks[0].up.register_full_backward_hook(lambda *_: None), "a hook sees the gradients"),
        (lambda m: spectral_norm(m.blocks[0].up), "computed from other parameters"),
        (lambda m: setattr(m.blocks[0].up, "forward", m.blocks[0].up.forward), "has its own forward"),
        (
            lambda m: setattr(m.blocks[0].down, "weight", m.blocks[1].down.weight),
            "shared by blocks.0.down, blocks.1.down",
        ),
        (
            lambda m: setattr(m.blocks[0].down, "bias", m.blocks[0].norm.bias),
            "shared by blocks.0.norm.bias, blocks.0.down",
        ),
    ],
)
def test_layers_that_cannot_be_split_stay_whole(change: Any, reason: str) -> None:
    module = Classifier()
    change(module)

    plan = make_plan(module, 2)

    assert any(reason in why for why in plan.whole.values()), plan.whole
    assert ("blocks.0.up" in plan.whole) == ("blocks.0.down" in plan.whole), "both or none"


def test_a_plan_of_the_user() -> None:
    plan = yaml.safe_load("{'blocks.*.up': colwise, 'blocks.*.down': rowwise, head: vocab}")

    made = make_plan(Classifier(), 2, plan)

    assert written(made) == {**BLOCKS, "head": "vocab"}
    assert set(made.whole.values()) == {"the plan does not name it"}


@pytest.mark.parametrize(
    ("plan", "num_ranks", "message"),
    [
        ("automatic", 2, """plan='automatic' has to be "auto", or a dict"""),
        ({}, 2, "a dict with names of layers"),
        ({1: "colwise"}, 2, "a dict with names of layers"),
        ({"blocks.*.upp": "colwise"}, 2, "names no layer of Classifier. Did you mean 'blocks.*.up'"),
        ({"blocks.*.up": "columns"}, 2, "'columns' is no style. The styles are 'colwise': split the output"),
        ({"blocks.*.norm": "colwise"}, 2, "blocks.0.norm is a LayerNorm, which cannot be split"),
        (
            {"embedding": "rowwise"},
            2,
            "embedding cannot be split 'rowwise', because it is an embedding, which can be split",
        ),
        ({"blocks.*.up": "colwise"}, 3, "3 ranks do not divide its 128 output features"),
        ({"blocks.*.up": "rowwise"}, 3, "3 ranks do not divide its 64 input features"),
        ({"head": "vocab"}, 302, "too few for 302 tensor ranks"),
        ({"blocks.*.up": "colwise", "blocks.0.*p": "rowwise"}, 2, "blocks.0.up is 'colwise' by 'blocks.*.up'"),
    ],
)
def test_mistakes_are_named(plan: Any, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_plan(Classifier(), num_ranks, plan)


def test_layers_that_cannot_be_split_are_named() -> None:
    module = Classifier(is_tied=True)
    with pytest.raises(ConfigurationError, match="shared by embedding, head"):
        make_plan(module, 2, {"head": "vocab"})
    assert written(make_plan(module, 2, {"head": "vocab", "embedding": "vocab"})) == {
        "embedding": "vocab",
        "head": "vocab",
    }

    module = Classifier()
    module.embedding.max_norm = 1.0
    with pytest.raises(
        ConfigurationError, match="embedding cannot be split 'vocab', because it is an embedding with max"
    ):
        make_plan(module, 2, {"embedding": "vocab"})
