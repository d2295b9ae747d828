"""Small models of transformers in a LightningModule, and a function that fits and saves them."""

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.contract.cases import strategy_of
from tests.running import SaveAt, quiet_trainer

VOCABULARY = 48


def config_of(kind: str) -> Any:
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    decoder = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = {
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, **common),
        "T5ForConditionalGeneration": lambda: transformers.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, **common
        ),
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(num_key_value_heads=1, **decoder, **common),
        "MixtralForCausalLM": lambda: transformers.MixtralConfig(
            num_key_value_heads=1, num_local_experts=3, **decoder, **common
        ),
        "BertForSequenceClassification": lambda: transformers.BertConfig(
            max_position_embeddings=16, num_labels=3, **decoder, **common
        ),
    }
    config = made[kind]()
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "hidden_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def made(kind: str) -> Any:
    torch.manual_seed(3)
    return getattr(transformers, kind)(config_of(kind))


def tokens(length: int = 16) -> Tensor:
    return torch.randint(1, VOCABULARY, (length, 8), generator=torch.Generator().manual_seed(1))


def outputs(model: Any) -> Tensor:
    """Return the logits of a model in evaluation mode."""
    batch = tokens(4)
    more = {"decoder_input_ids": batch} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=batch, **more).logits


class Wrapped(LightningModule):
    """Wraps a model of transformers.

    Args:
        kind: the class of the model.
        extra: `"head"` adds a head, `"teacher"` a frozen second model; `"compiled"` compiles the model and
            `"compiled inside"` one of its blocks.
    """

    def __init__(self, kind: str = "GPT2LMHeadModel", extra: str = "") -> None:
        super().__init__()
        self.model = made(kind)
        if extra == "head":
            self.head = nn.Linear(2, 2)
        if extra == "teacher":
            self.teacher = made("LlamaForCausalLM").requires_grad_(False)
        if extra == "compiled":
            self.model = torch.compile(self.model, backend="eager")
        if extra == "compiled inside":
            self.model.transformer.h[0] = torch.compile(self.model.transformer.h[0], backend="eager")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        labels = batch[:, 0] % 3 if "Classification" in type(self.model).__name__ else batch
        loss = self.model(input_ids=batch, labels=labels).loss
        return loss + self.head(loss.expand(2)).mean() if hasattr(self, "head") else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit_and_save(label: str, num_ranks: int, path: str, kind: str, extra: str = "", precision: Any = None) -> Tensor:
    """Fit two steps, save during the fit, and return the trained model's logits."""
    module = Wrapped(kind, extra)
    trainer = quiet_trainer(
        strategy=strategy_of(label), devices=num_ranks, max_steps=2, callbacks=[SaveAt(2, path)], precision=precision
    )
    trainer.fit(module, DataLoader(tokens(), batch_size=4))
    return outputs(getattr(module.model, "_orig_mod", module.model)).float()
