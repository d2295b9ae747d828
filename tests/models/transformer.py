"""A small Transformer that is built in `configure_model`, and random tokens to train it on."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256
_NUM_HEADS = 4
_LENGTH = 2**20


class Block(nn.Module):
    """A layer with causal attention and a feed-forward network, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the shape of `hidden`, `[batch, length, width]`."""
        parts = self.query_key_value(self.attention_norm(hidden)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (_NUM_HEADS, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).flatten(2))
        output: Tensor = hidden + self.feed_forward(hidden)
        return output


class SmallTransformer(LightningModule):
    """A causal language model, which is built in `configure_model`.

    Args:
        width: the width of the hidden states.
        num_layers: the number of layers, each of which has about `12 * width**2` parameters.
        context: the largest number of tokens of a sample.
    """

    def __init__(self, width: int = 256, num_layers: int = 4, context: int = 128) -> None:
        super().__init__()
        self._width, self._num_layers, self._context = width, num_layers, context

    def configure_model(self) -> None:
        """Build the layers, once."""
        if hasattr(self, "blocks"):
            return
        width, num_layers = self._width, self._num_layers
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(self._context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_layers)))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape `[batch, length, vocabulary]` for tokens of shape `[batch, length]`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.blocks(self.embedding(tokens) + self.positions(positions)))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the next tokens."""
        logits = self(batch[:, :-1])
        return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class RandomTokens(Dataset[Tensor]):
    """Random tokens, which are the same for the same index."""

    def __init__(self, context: int) -> None:
        self._context = context

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(VOCABULARY, (self._context + 1,), generator=generator)


class RandomTokenData(LightningDataModule):
    """Batches of random tokens, of shape `[batch_size, context + 1]`.

    Args:
        batch_size: samples of a batch of one rank.
        context: the number of tokens of a sample that the model sees.
    """

    def __init__(self, batch_size: int = 8, context: int = 128) -> None:
        super().__init__()
        self._batch_size, self._context = batch_size, context

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the loader."""
        return DataLoader(RandomTokens(self._context), batch_size=self._batch_size, drop_last=True)
