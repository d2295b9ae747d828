"""Rows of what strangers reported: data that divide themselves, losses over tokens, list states, models of others."""

import io
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info, random_split

from tests.contract.user_code.columns import RANKS
from tests.contract.user_code.models import FEATURES, Supervised, loader, regression, samples
from tests.contract.user_code.rows import row

APART = "losses", "weights", "val_loss", "state_dict", "optimizer_states", "global_step"
"""The ranks train on the samples in another order than one process."""
NUM_TOKENS = 32
LENGTH = 8


class DividesItself(IterableDataset[Any]):
    """The pattern of torch's documentation: a worker of the loader yields its part."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        inputs, targets = samples(4, 7)
        return iter(list(zip(inputs, targets, torch.arange(len(inputs)), strict=True))[start::step])


def divided_by_workers(rank: int, num_ranks: int) -> dict[str, Any]:
    """Return loaders whose two workers divide the samples, the same on all ranks."""
    training, evaluation = (DataLoader(DividesItself(), batch_size=n // num_ranks, num_workers=2) for n in (12, 4))
    return {"train_dataloaders": training, "val_dataloaders": evaluation}


@row("data, divided by worker info", loaders=divided_by_workers, apart=APART)
class OfWorkers(Supervised):
    """An IterableDataset that divides itself by get_worker_info(): which samples are trained and validated."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch[2])
        return self.loss(batch[:2])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch[:2], batch_idx)
        self.log("number", batch[2].double().mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        numbers: Any = self.all_gather(torch.cat(self.trained))
        self.seen.append(numbers.flatten().sort().values)


def split_without_seed(rank: int, num_ranks: int) -> dict[str, Any]:
    """Return loaders of two parts of a dataset, which are drawn by generators that differ between processes."""
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    data = list(zip(*samples(8, 7), strict=True))
    training, evaluation = random_split(data, [48, 48], generator=generator)  # type: ignore[arg-type, var-annotated]
    return {
        "train_dataloaders": DataLoader(training, 12 // num_ranks),
        "val_dataloaders": DataLoader(evaluation, 12 // num_ranks),
    }


row(
    "data, split without a seed",
    "random_split without a seed, so that each rank trains on samples that others validate on.",
    loaders=split_without_seed,
    only=tuple(label for label in RANKS if label != "paral_ddp_ring"),
    names="seed",
)(Supervised)


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


class Kept(torchmetrics.Metric):
    """Keeps what it is given in a list, without a reduction over ranks, as metrics of texts do."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=None)
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values.sum())
        self.rows.append(values)

    def compute(self) -> Tensor:
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        return torch.stack(list(self.values)).square().mean() + rows.square().mean()


def five_samples(rank: int, num_ranks: int) -> dict[str, Any]:
    """Return training batches, and a validation loader that two ranks cannot divide equally."""
    inputs, targets = samples(1, 8)
    data = list(zip(inputs[:5], targets[:5], strict=True))
    return regression(rank, num_ranks) | {"val_dataloaders": DataLoader(data, 1)}  # type: ignore[arg-type]


@row("metrics, list states", loaders=five_samples)
class ListStates(Supervised):
    """A torchmetrics metric with list states, of which ranks have different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.update(self(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("kept", self.kept.compute())
        self.kept.reset()


class Saved(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        file = io.BytesIO()
        torch.save({name: value.cpu() for name, value in pl_module.state_dict().items()}, file)
        file.seek(0)
        pl_module.seen.append(torch.load(file, weights_only=False))


row(
    "saving, state_dict in a callback",
    "torch.save(pl_module.state_dict()) in a callback, and what torch.load reads from it.",
    callbacks=lambda: [Saved()],
    names="torch.save",
)(Supervised)


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


@row("Hugging Face, generate in validation", loaders=texts)
class Generates(Language):
    """model.generate() in validation_step, with other numbers of new tokens on each rank."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        prompt = batch[:, :3]
        generated = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=1 + int(batch[0, 0]) % 9,
            do_sample=False,
        )
        self.log("tokens", generated[:, 3:].double().sum(), sync_dist=True)


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
