"""Modules of tokens, most of repeated blocks, which are units of FSDP and of activation checkpointing."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.tokens import LENGTH, VOCABULARY, Fitted

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Tied(Fitted):
    """Three blocks, one of them called twice, and an embedding whose weight is also that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(self.scale * x)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return next_token_loss(self(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        # Some gradients are almost zero, and Adam would turn their rounding errors into full steps.
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class TiedBlocks(Tied):
    """Two blocks share a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[1].up


class FrozenEncoder(Fitted):
    """A frozen encoder, run without gradients, and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(LENGTH, WIDTH), Block(), Block()).requires_grad_(False)
        self.head = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs = batch[0].float() / VOCABULARY
        with torch.no_grad():
            encoded = self.encoder(inputs)
        return nn.functional.mse_loss(self.head(encoded).squeeze(1), inputs.sum(dim=1))


class Adapter(nn.Module):
    """LoRA: a frozen layer plus the trained product of two small matrices."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


class LoRA(Tied):
    """Frozen blocks with trained adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapter(block.up), Adapter(block.down)


class OnTheModule(Fitted):
    """Parameters of the LightningModule itself, one of them 0-dimensional, used in `forward` and in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens) + self.positions))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return next_token_loss(self(batch[0]) * self.temperature + self.bias, batch[0])


class Network(nn.Module):
    """Has methods besides `forward` that call one another, and so do its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Head() for _ in range(2))

    def encode(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def loss(self, tokens: Tensor) -> Tensor:
        return sum(block.loss(self.encode(tokens), tokens) for block in self.blocks)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.out = nn.Linear(WIDTH, VOCABULARY)

    def logits(self, x: Tensor) -> Tensor:
        return self.out(self(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.out.weight.mean()

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        penalty = self.out.weight.square().mean()
        return next_token_loss(self.logits(x), tokens) + penalty + self.out.bias.square().mean()


class OtherMethods(Fitted):
    """Calls methods of the network and of its blocks instead of `forward`, also those of one unit from another."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Network()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model.loss(batch[0]) + self.model.blocks[1].loss(self.model.encode(batch[0]), batch[0])


class UpdatedBuffers(Tied):
    """Counts its steps in a buffer that the loss depends on, and keeps a running sum in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.blocks[1].register_buffer("running", torch.zeros(3))

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.steps += 1
        self.blocks[1].running.mul_(0.9).add_(self.steps)
        return (
            super().loss(batch) * (1 + 1 / self.steps)
            + self.blocks[1].running.mean() * self.head.weight.square().mean()
        )


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


MODULES = {
    module.__name__: module
    for module in (
        Decayed, Tied, TiedBlocks, FrozenEncoder, LoRA, OnTheModule, OtherMethods, UpdatedBuffers, GPT2, T5,
    )
}  # fmt: skip
"""Modules written without a strategy in mind: rows of `tests.contract.user_code`, and trained on GPUs."""
