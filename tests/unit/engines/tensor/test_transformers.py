"""Plans of models of transformers, some of which carry a plan of their own."""

from types import MappingProxyType
from typing import Any

import pytest
import transformers

from lightning_paral import ConfigurationError
from lightning_paral.engines.tensor.planner import make_plan
from tests.models.planned import Language
from tests.unit.engines.tensor.test_plans import written

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}
LLAMA = MappingProxyType(
    {
        "embed_tokens": "vocab",
        "q_proj": "colwise*",
        "k_proj": "colwise*",
        "v_proj": "colwise*",
        "o_proj": "rowwise*",
        "gate_proj": "colwise*",
        "up_proj": "colwise*",
        "down_proj": "rowwise*",
        "lm_head": "vocab",
    }
)


def llama(**options: Any) -> Language:
    return Language(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | options)))


def qwen3(**options: Any) -> Language:
    return Language(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES | {"head_dim": 8} | options)))


def last_names(styles: dict[str, str]) -> dict[str, str]:
    """Return styles by the last part of each name; all layers of a name must have the same."""
    found: dict[str, str] = {}
    for name, style in styles.items():
        assert found.setdefault(name.rpartition(".")[2], style) == style
    return found


@pytest.mark.parametrize("is_tied", [False, True])
def test_llama_is_split_by_heads(is_tied: bool) -> None:
    plan = make_plan(llama(tie_word_embeddings=is_tied), 2)

    assert last_names(written(plan)) == LLAMA
    assert plan.whole == {}


def test_norms_of_heads_are_local() -> None:
    assert last_names(written(make_plan(qwen3(), 2))) == {**LLAMA, "q_norm": "local", "k_norm": "local"}


def test_hooks_see_all_heads() -> None:
    model = llama()
    model.model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)

    styles = written(make_plan(model, 2))

    assert [
        name for name in ("q_proj", "o_proj") if styles[f"model.model.layers.0.self_attn.{name}"].endswith("*")
    ] == []


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_heads_that_cannot_be_divided_are_named(num_ranks: int) -> None:
    with pytest.raises(ConfigurationError, match=r"num_attention_heads=4, num_key_value_heads=2\..* do: 1, 2"):
        make_plan(llama(), num_ranks)


def test_heads_that_cannot_be_divided_are_gathered_in_a_plan_of_the_user() -> None:
    plan = {"*.[qkv]_proj": "colwise", "*.o_proj": "rowwise", "*.gate_proj": "colwise"}

    assert last_names(written(make_plan(llama(), 2, plan))) == {
        **{name: LLAMA[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
        "gate_proj": "colwise",
    }
    assert "*" not in "".join(written(make_plan(llama(), 4, plan)).values())
