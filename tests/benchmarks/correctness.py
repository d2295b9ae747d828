"""Losses of every strategy next to those of one process, on a small GPT.

    python -m tests.benchmarks.correctness

Every name is trained on two ranks (`paral_dp`: two devices) by `Trainer(strategy=NAME)`, on the same global batches as
one process: where each rank draws samples of its own, with half of the batch size. What is compared is what users see:
the logged losses of training and validation, and the weights of the saved checkpoint.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from examples.gpt import GPT, StandardLibrary
from lightning_paral import STRATEGIES, Offload
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.exchange import RankGroup
from tests.benchmarks.common import print_table, silent_ranks
from tests.running import quiet_trainer

NAMES = tuple(entry.name for entry in STRATEGIES if entry.name != "paral_auto")  # it becomes one of the others
NUM_RANKS = 2
NUM_STEPS = 20
GLOBAL_BATCH_SIZE = 8
CONTEXT = 32
NUM_VALIDATION_SAMPLES = 37  # odd: one rank has fewer
ONE_PROCESS = "one process"
SMALL_BUFFERS = 100_000


class SmallGPT(GPT):
    """A small GPT of the example that logs its losses as means over the ranks."""

    def __init__(self) -> None:
        super().__init__(width=32, num_layers=2, num_heads=2, context=CONTEXT)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print nothing."""


class Losses(Callback):
    """Records the logged values of every step."""

    def __init__(self) -> None:
        self.training: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.training.append(float(trainer.callback_metrics["train_loss"]))


def fit(name: str, folder: str) -> dict[str, Any]:
    """Train under a strategy; return the logged losses. *Collective* over the ranks."""
    torch.manual_seed(0)
    module, losses = SmallGPT(), Losses()
    divides_samples = name not in (ONE_PROCESS, "paral_dp", "paral_tp", "paral_fsdp_tp", "paral_pp")
    trainer = quiet_trainer(
        strategy="auto" if name == ONE_PROCESS else _strategy(name, folder),
        devices=1 if name == ONE_PROCESS else NUM_RANKS,
        max_steps=NUM_STEPS,
        limit_val_batches=1.0,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        callbacks=[losses],
    )
    batch_size = GLOBAL_BATCH_SIZE // NUM_RANKS if divides_samples else GLOBAL_BATCH_SIZE
    training = Subset(StandardLibrary("train", CONTEXT), range(NUM_STEPS * GLOBAL_BATCH_SIZE))
    validation = Subset(StandardLibrary("validation", CONTEXT), range(NUM_VALIDATION_SAMPLES))
    trainer.fit(module, DataLoader(training, batch_size), DataLoader(validation, batch_size))
    trainer.save_checkpoint(_checkpoint(name, folder), weights_only=True)
    return {"training": losses.training, "validation": float(trainer.callback_metrics["val_loss"])}


def _strategy(name: str, folder: str) -> Any:
    if name != "paral_zero3_nvme":
        return name
    # An object instead of a name, because buffers of the default size hold 100 million elements each.
    (entry,) = [entry for entry in STRATEGIES if entry.name == name]
    offload = Offload("nvme", path=folder, buffer_numel=SMALL_BUFFERS)
    return entry.strategy(**entry.arguments | {"offload_optimizer": offload, "offload_parameters": offload})


def _checkpoint(name: str, folder: str) -> str:
    return f"{folder}/{name.replace(' ', '_')}.ckpt"


def _weights(name: str, folder: str) -> dict[str, Tensor]:
    found = load(_checkpoint(name, folder), RankGroup(), weights_only=True)["state_dict"]
    return {key: torch.as_tensor(value).clone() for key, value in found.items()}


def measure() -> dict[str, Any]:
    """Train under every name; return losses and the largest differences from one process."""
    rows: dict[str, Any] = {}
    # The folder is on a disk, which NVMe offload needs.
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder, silent_ranks() as on_ranks:
        for name in (ONE_PROCESS, *NAMES):
            row = on_ranks(1 if name in (ONE_PROCESS, "paral_dp") else NUM_RANKS, fit, name, folder)[0]
            assert len(row["training"]) == NUM_STEPS, name
            rows[name] = row
            expected, weights, found = rows[ONE_PROCESS], _weights(ONE_PROCESS, folder), _weights(name, folder)
            assert found.keys() == weights.keys(), name
            pairs = zip(row["training"], expected["training"], strict=True)
            row["training_difference"] = max(abs(loss - other) / other for loss, other in pairs)
            row["validation_difference"] = abs(row["validation"] / expected["validation"] - 1.0)
            row["weight_difference"] = max(float((found[key] - weights[key]).abs().max()) for key in weights)
    return rows


def main() -> None:
    """Print the losses and the largest differences."""
    shown = (0, 1, 4, 9, 19)
    kinds = ("training", "validation", "weight")
    rows = [
        [name, *(row["training"][step] for step in shown), row["validation"]]
        + [row[f"{kind}_difference"] for kind in kinds]
        for name, row in measure().items()
    ]
    headers = ("", *(f"step {step + 1}" for step in shown), "validation", *(f"difference, {kind}" for kind in kinds))
    print_table(headers, rows, ("", *[".6f"] * 6, *[".1e"] * 3))


if __name__ == "__main__":
    main()
