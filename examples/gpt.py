"""A byte-level GPT, trained on the source of Python's standard library, so that nothing has to be downloaded.

paral fit --config configs/gpt.yaml --config configs/strategies/ddp.yaml
"""

import hashlib
import math
import sysconfig
import time
from functools import cache
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

VOCABULARY = 256


@cache
def read_standard_library(split: str) -> bytearray:
    """Return the files of a split, one after the other."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", "dist-packages/", "test/")):
            continue
        in_validation = hashlib.sha256(name.encode()).digest()[0] < 26  # about a tenth of the files
        if in_validation == (split == "validation"):
            text += path.read_bytes()
    return text


class StandardLibrary(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `context` bytes of the standard library's source, each with the window shifted by one byte.

    Args:
        split: `"train"` or `"validation"`. A hash of a file's name determines the split to which the file belongs.
        context: the number of bytes per window.
    """

    def __init__(self, split: str, context: int) -> None:
        self.text = torch.frombuffer(read_standard_library(split), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


class StandardLibraryData(LightningDataModule):
    """The standard library's source in batches of `(inputs, targets)`, each of shape `[batch_size, context]`.

    Args:
        batch_size: the number of windows per batch and rank.
        context: the number of bytes per window.
        num_validation_windows: the number of windows for validation, over all ranks.
    """

    def __init__(self, batch_size: int = 32, context: int = 128, num_validation_windows: int = 512) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.context = context
        self.num_validation_windows = num_validation_windows

    def setup(self, stage: str) -> None:
        self.train = StandardLibrary("train", self.context)
        validation = StandardLibrary("validation", self.context)
        every = max(1, len(validation) // self.num_validation_windows)
        windows = range(0, len(validation), every)[: self.num_validation_windows]
        self.validation = torch.utils.data.Subset(validation, windows)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.validation, batch_size=self.batch_size)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader


class Block(nn.Module):
    """A transformer block with pre-norm: causal attention, then a feed-forward network."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            projection.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class GPT(LightningModule):
    """A GPT that predicts the next byte.

    Args:
        width: the number of features per position.
        num_layers: the number of transformer blocks.
        num_heads: the number of attention heads per block.
        context: the length of the longest input, in bytes.
        learning_rate: the peak of AdamW's learning rate, reached after `num_warmup_steps`.
        num_warmup_steps: the number of optimizer steps of linear warm-up.
    """

    def __init__(
        self,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        context: int = 128,
        learning_rate: float = 2e-3,
        num_warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.byte_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.byte_embedding.weight, std=0.02)
        nn.init.normal_(self.position_embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.002)
        self.validation_loss = MeanMetric()
        self.step_started = math.nan

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of shape `[batch, length, 256]` for inputs of shape `[batch, length]`, dtype int64."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.byte_embedding(inputs) + self.position_embedding(positions)
        return self.head(self.norm(self.blocks(x)))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        inputs, targets = batch
        return functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.step_started = time.perf_counter()

    def on_train_batch_end(self, outputs: object, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        num_tokens = batch[0].numel() * self.trainer.world_size
        self.log("tokens_per_second", num_tokens / (time.perf_counter() - self.step_started), prog_bar=True)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validation_loss.update(self.loss(batch), weight=len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        loss = self.validation_loss.compute()
        self.validation_loss.reset()
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.print(f"\nstep {self.global_step}: validation loss {loss:.3f} nats per byte")

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=-1)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.01)
        warmup = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / self.hparams.num_warmup_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
