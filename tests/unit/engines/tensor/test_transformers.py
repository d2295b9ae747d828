"""Models of transformers are split by the plain shapes of their layers."""

from typing import Any

import pytest
import transformers

from lightning_paral.engines.tensor.plan import make_plan
from tests.models.planned import Language
from tests.unit.engines.tensor.test_plans import written

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
}
QWEN3 = transformers.Qwen3Config(**SIZES, head_dim=8)


def last_names(styles: dict[str, str]) -> dict[str, str]:
    """Return styles by the last part of each name; all layers of a name must have the same."""
    found: dict[str, str] = {}
    for name, style in styles.items():
        assert found.setdefault(name.rpartition(".")[2], style) == style
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])  # 4 ranks do not divide the heads of keys, which are gathered
@pytest.mark.parametrize(
    "model",
    [
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
        transformers.Qwen3ForCausalLM(QWEN3),
    ],
    ids=["llama", "tied llama", "qwen3"],
)
def test_attentions_feed_forward_networks_and_vocabulary_are_split(model: Any, num_ranks: int) -> None:
    plan = make_plan(Language(model), num_ranks)

    assert last_names(written(plan)) == {
        "embed_tokens": "vocab",
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
        **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
        "lm_head": "vocab",
    }
    assert plan.whole == {}
