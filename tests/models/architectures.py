"""Modules written without a strategy in mind, with tied, frozen, 0-dimensional and shared parameters."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.tokens import LENGTH, VOCABULARY, Fitted


class Contrastive(Fitted):
    """CLIP's head: a 0-dimensional parameter scales the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(LENGTH, 16)
        self.text = nn.Linear(LENGTH, 16)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs = batch[0].float()
        image, text = self.image(inputs.sin()), self.text(inputs.cos())
        similarity = (image * text).mean(dim=1) * self.logit_scale.exp()
        return nn.functional.mse_loss(similarity, inputs[:, 0] / VOCABULARY)


class Decayed(Fitted):
    """Weight decay for matrices only, by `p.dim() > 1`; a scheduler per step; a group of frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(LENGTH, LENGTH).requires_grad_(False)
        self.hidden = nn.Linear(LENGTH, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs = self.frozen(batch[0].float() / VOCABULARY)
        return nn.functional.mse_loss(self.out(self.norm(self.hidden(inputs).tanh())).squeeze(1), inputs.sum(dim=1))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": list(self.frozen.parameters()), "lr": 1.0},
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.5, "lr": 2e-2},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        assert len(groups[1]["params"]) == 2
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TiedLanguageModel(Fitted):
    """Tied embeddings, a frozen submodule, a block called twice, a non-persistent buffer, a weight in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.positions = nn.Embedding(LENGTH, 16).requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight
        x = x + self.scale * self.block(x)
        x = x + self.scale * self.block(x)
        return self.head(self.norm(x))

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        logits = self(tokens)
        penalty = 1e-3 * self.block[0].weight.square().sum()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) + penalty


class GPT2(Fitted):
    """GPT-2 of `transformers`, built from a configuration."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0)
        config.attn_pdrop = config.embd_pdrop = 0.0
        self.model = GPT2LMHeadModel(config)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


class T5(Fitted):
    """T5 of `transformers`, built from a configuration: one embedding shared by encoder, decoder and head."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        self.model = T5ForConditionalGeneration(
            T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0)
        )

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0].flip(1), decoder_input_ids=batch[0]).loss


MODULES = {module.__name__: module for module in (Contrastive, Decayed, TiedLanguageModel, GPT2, T5)}
