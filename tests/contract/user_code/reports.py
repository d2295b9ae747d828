"""Rows of what strangers reported: data that divide themselves, losses over tokens, list states, models of others."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.contract.user_code.models import FEATURES, Supervised, loader
from tests.contract.user_code.rows import row

NUM_TOKENS = 32
LENGTH = 8


def padded(rank: int, num_ranks: int) -> dict[str, Any]:
    """Return batches of tokens whose labels are padded with -100, by other numbers in each sample."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, NUM_TOKENS, (48, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    lengths = torch.randint(2, LENGTH, (48, 1), generator=generator)
    lengths.view(-1, 12)[:, :2] = LENGTH  # so that it matters which samples are looked at
    labels[torch.arange(LENGTH) >= lengths] = -100
    return {"train_dataloaders": loader(tokens, labels, rank=rank, num_ranks=num_ranks)}


@row("loss, ignored tokens", loaders=padded, reference="ddp")
class Tokens(Supervised):
    """cross_entropy with ignore_index, a mean over tokens of which samples have different numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, FEATURES)
        self.head = nn.Linear(7, NUM_TOKENS)

    def loss(self, batch: Any) -> Tensor:
        tokens, labels = batch
        logits = self.head(self.backbone(self.embedding(tokens)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Weighted(nn.Module):
    """A loss with a buffer and a hook, equal to another one with the same buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets).square() * self.scale).mean()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and torch.equal(self.scale, other.scale)  # type: ignore[attr-defined]

    __hash__ = nn.Module.__hash__


@row("saving, modules in the checkpoint", resumed=True)
class WithModules(Supervised):
    """Modules put into the checkpoint in on_save_checkpoint: a loss and metrics (pytorch-forecasting)."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = Weighted()
        self.metrics = nn.ModuleList([torchmetrics.MeanMetric()])

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["user_loss"] = self.criterion
        checkpoint["metrics"] = self.metrics

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.criterion.load_state_dict(checkpoint["user_loss"].state_dict())


def texts(rank: int, num_ranks: int) -> dict[str, Any]:
    """Return batches of tokens, and validation prompts one by one, which two ranks cannot divide equally."""
    tokens = torch.randint(2, NUM_TOKENS, (53, LENGTH), generator=torch.Generator().manual_seed(5))
    return {
        "train_dataloaders": loader(tokens[:48], rank=rank, num_ranks=num_ranks),
        "val_dataloaders": DataLoader(tokens[48:], 1),  # type: ignore[arg-type]
    }


class Language(LightningModule):
    """Fine-tunes a small Llama of transformers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=NUM_TOKENS,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=32,
                bos_token_id=0,
                eos_token_id=None,
                pad_token_id=0,
            )
        )
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class SavesPretrained(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory() as folder:
            pl_module.model.save_pretrained(folder)
            saved = {
                name: value for path in Path(folder).glob("*.safetensors") for name, value in load_file(path).items()
            }
        pl_module.seen.append(trainer.strategy.broadcast(saved))  # transformers writes on rank 0 only


@row("Hugging Face, PEFT", callbacks=lambda: [SavesPretrained()], loaders=texts, names="save_pretrained")
class LowRank(Language):
    """A LoRA of peft, trained, and saved by save_pretrained() in a callback."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        self.model = get_peft_model(self.model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
