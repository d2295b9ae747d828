"""Models of Hugging Face train in a pipeline as in one process, tied and untied, or are refused with the reason."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_paral import ConfigurationError, ParalPipelineStrategy, RankFailedError
from tests.models.chain import Losses
from tests.running import quiet_trainer

VOCABULARY = 128
LENGTH = 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4}


_DECODER = (["model.model.embed_tokens"], ["model.model.norm", "model.lm_head"])
ENDS = {
    "llama": _DECODER,
    "qwen3": _DECODER,
    "gpt2": (["model.transformer.wte", "model.transformer.wpe"], ["model.transformer.ln_f", "model.lm_head"]),
    "bert": ([], ["model.cls"]),  # its embeddings are a unit
}
"""The modules that only the first and the last stage need, if weights are not tied."""


def build(kind: str, tied: bool) -> Any:
    tie = {"tie_word_embeddings": tied}
    if kind == "llama":
        config = transformers.LlamaConfig(**SIZES, **tie, num_key_value_heads=2, intermediate_size=128)
        return transformers.LlamaForCausalLM(config)
    if kind == "qwen3":
        config = transformers.Qwen3Config(**SIZES, **tie, num_key_value_heads=2, intermediate_size=128, head_dim=16)
        return transformers.Qwen3ForCausalLM(config)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2_SIZES, **NO_DROPOUT, **tie))
    if kind == "bert":
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **no_dropout, **tie))
    config = transformers.T5Config(**T5_SIZES, **tie, d_kv=16, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


Fitted = tuple[list[float], dict[str, Tensor]]
"""Losses and weights."""


class LanguageModel(LightningModule):
    def __init__(self, kind: str, tied: bool) -> None:
        super().__init__()
        self.model = build(kind, tied).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit_language_model(world_size: int, make: Callable[[], Any], strategy: Any, *more: Callback) -> Fitted:
    torch.manual_seed(0)
    module, losses = make(), Losses()
    options: dict[str, Any] = {"max_epochs": 1, "callbacks": [losses, *more], "gradient_clip_val": 1.0}
    trainer = quiet_trainer(devices=world_size, strategy=strategy, **options)
    batches = torch.randint(0, VOCABULARY, (40, LENGTH), generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(batches, batch_size=8))
    return losses.values, {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


@cache
def in_one_process(kind: str, tied: bool) -> Fitted:
    return fit_language_model(1, partial(LanguageModel, kind, tied), "auto")


@pytest.mark.parametrize(("world_size", "schedule"), [(2, "1f1b"), (4, "1f1b"), (2, "interleaved")])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "bert"])
def test_language_model_equals_one_process(on_ranks, kind: str, tied: bool, world_size: int, schedule: Any) -> None:
    losses, weights = in_one_process(kind, tied)
    first, last = ([], []) if tied else ENDS[kind]
    strategy = ParalPipelineStrategy(first_stage=first, last_stage=last, schedule=schedule)

    ranks = on_ranks(world_size, fit_language_model, world_size, partial(LanguageModel, kind, tied), strategy)
    for found_losses, found in ranks:
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found.keys() == weights.keys()
        for name, weight in found.items():
            assert (weight - weights[name]).abs().max() <= 1e-5, name


def outcome_of_t5(balance: list[int]) -> Fitted | str:
    try:
        return fit_language_model(2, partial(LanguageModel, "t5", True), ParalPipelineStrategy(balance=balance))
    except (ConfigurationError, RankFailedError) as error:
        return str(error)


def test_decoder_uses_the_encoder_on_the_stage_after_it(in_own_world) -> None:
    losses, _ = in_one_process("t5", True)

    for found in in_own_world(2, outcome_of_t5, [2, 2]):
        assert found[0] == pytest.approx(losses, rel=1e-5)


def test_decoder_that_lacks_the_encoder_is_refused(in_own_world) -> None:
    assert all("is NaN on the first samples" in found for found in in_own_world(2, outcome_of_t5, [3, 1]))
