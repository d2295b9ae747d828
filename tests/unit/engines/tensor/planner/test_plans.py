"""The plans that are made for a module, by themselves and from what users write."""

import re
from typing import Any

import pytest
import yaml
from torch import Tensor
from torch.nn.utils import parametrizations, spectral_norm

from lightning_paral import ConfigurationError
from lightning_paral.engines.tensor.planner.make import make_plan
from tests.models.planned import bytes_of_text, gpt
from tests.unit.engines.tensor.planner.models import INPUTS, Classifier, Step, observed, planned, written

BLOCKS = {f"blocks.{n}.{name}": style for n in range(2) for name, style in (("up", "colwise*"), ("down", "rowwise*"))}


def test_chains_vocabulary_and_layers_that_gather() -> None:
    assert written(planned(Classifier())) == {"embedding": "vocab", **BLOCKS, "head": "vocab"}
    plan = planned(gpt(num_layers=1), bytes_of_text())
    assert written(plan) == {
        "byte_embedding": "vocab",
        "blocks.0.query_key_value": "colwise",
        "blocks.0.attention_out": "colwise",
        "blocks.0.feed_forward.1": "colwise*",
        "blocks.0.feed_forward.3": "rowwise*",
        "head": "vocab",
    }
    assert plan.whole == {"position_embedding": "it has only 64 rows"}


def test_without_observations_every_layer_gathers() -> None:
    plan = make_plan(Classifier(), 2)

    assert written(plan) == {"embedding": "vocab", **dict.fromkeys(BLOCKS, "colwise")}
    assert plan.whole == {"head": "2 ranks do not divide its 301 output features"}


def test_only_the_vocabulary_is_uneven() -> None:
    plan = planned(Classifier(), num_ranks=3)

    assert written(plan) == {"embedding": "vocab", "head": "vocab"}
    assert plan.whole["blocks.0.up"] == "3 ranks do not divide its 128 output features"


def test_a_tied_vocabulary_is_split_in_both_layers_or_none() -> None:
    assert written(planned(Classifier(is_tied=True))) == {"embedding": "vocab", **BLOCKS, "head": "vocab"}

    class UsesWeight(Classifier):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.head.weight.norm()

    plan = planned(UsesWeight(is_tied=True))
    assert written(plan) == BLOCKS
    assert "norm" in plan.whole["embedding"] + plan.whole["head"]
    assert set(plan.whole) == {"embedding", "head"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: setattr(m.embedding, "max_norm", 1.0), "max_norm=1.0"),
        (lambda m: parametrizations.weight_norm(m.blocks[0].up), "parametrizations"),
        (lambda m: spectral_norm(m.blocks[0].up), "computed from other parameters"),
        (lambda m: setattr(m.blocks[0].up, "forward", m.blocks[0].up.forward), "has its own forward"),
        (
            lambda m: setattr(m.blocks[0].down, "weight", m.blocks[1].down.weight),
            "shared by blocks.0.down, blocks.1.down",
        ),
        (lambda m: setattr(m.blocks[0].down, "bias", m.blocks[0].norm.bias), "outside of its forward: layer_norm"),
    ],
)
def test_layers_that_cannot_be_split_stay_whole(change: Any, reason: str) -> None:
    module = Classifier()
    change(module)

    plan = planned(module)

    assert any(reason in why for why in plan.whole.values()), plan.whole
    if "blocks.0.up" in plan.whole or "blocks.0.down" in plan.whole:
        other = "down" if "blocks.0.up" in plan.whole else "up"
        assert written(plan)[f"blocks.0.{other}"] == "colwise", "the other layer of the pair gathers"


def test_a_plan_of_the_user_is_exact_and_leaves_out_what_is_proven() -> None:
    plan = yaml.safe_load("{'blocks.*.up': colwise, 'blocks.*.down': rowwise, head: vocab}")

    made = planned(Classifier(), plan=plan)

    assert written(made) == {**BLOCKS, "head": "vocab"}
    assert made.whole == {"embedding": "the plan does not name it"}
    assert written(make_plan(Classifier(), 2, plan=plan))["blocks.0.up"] == "colwise"


@pytest.mark.parametrize(
    ("plan", "num_ranks", "message"),
    [
        ("automatic", 2, """plan='automatic' has to be "auto" or a dict"""),
        ({}, 2, "splits no layer"),
        ({1: "colwise"}, 2, "has to be the name of a layer"),
        ({"blocks.*.upp": "colwise"}, 2, "names no layer of Classifier. Did you mean 'blocks.*.up'"),
        ({"blocks.*.up": "columns"}, 2, "'columns' is no style. The styles are 'colwise': split the output"),
        ({"blocks.*.up": "colwize"}, 2, "Did you mean 'colwise'?"),
        ({"blocks.*.norm": "colwise"}, 2, "blocks.0.norm is a LayerNorm, which cannot be split"),
        ({"embedding": "rowwise"}, 2, "embedding is an embedding, which cannot be split 'rowwise'"),
        ({"blocks.*.up": "colwise"}, 3, "3 ranks do not divide its 128 output features"),
        ({"blocks.*.up": "rowwise"}, 3, "3 ranks do not divide its 64 input features"),
        ({"head": "vocab"}, 302, "too few for 302 tensor ranks"),
        ({"blocks.*.up": "colwise", "blocks.0.*p": "rowwise"}, 2, "blocks.0.up is 'colwise' by 'blocks.*.up'"),
    ],
)
def test_mistakes_are_named(plan: Any, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_plan(Classifier(), num_ranks, plan=plan)


def test_layers_that_cannot_be_split_are_named() -> None:
    module = Classifier(is_tied=True)
    with pytest.raises(ConfigurationError, match="shared by embedding, head"):
        make_plan(module, 2, plan={"head": "vocab"})
    assert written(make_plan(module, 2, plan={"head": "vocab", "embedding": "vocab"})) == {
        "embedding": "vocab",
        "head": "vocab",
    }

    module = Classifier()
    module.embedding.max_norm = 1.0
    with pytest.raises(ConfigurationError, match="embedding cannot be split, because it is an embedding with max_norm"):
        make_plan(module, 2, plan={"embedding": "vocab"})

    step = Step()
    step.forward = lambda x: step.down(step.up(x)) + step.up.weight.sum()  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="its weight is used outside of its forward: sum"):
        make_plan(step, 2, observed(step, INPUTS), {"up": "colwise"})
