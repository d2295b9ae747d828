"""A module that logs its training step in every way that users do, and a function that fits it."""

import csv
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryPrecision

from tests.contract.cases import strategy_of
from tests.running import quiet_trainer

FEATURES = 3


class LogsEverything(LightningModule):
    """Logs values with every reduction and option, and metrics of every kind, in hooks of the training step."""

    def __init__(self, manual: bool = False, several: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.several = several
        self.layer = nn.Linear(FEATURES, 1)
        self.accuracy = BinaryAccuracy()
        self.auroc = BinaryAUROC()
        self.synced = MeanSquaredError(dist_sync_on_step=True)
        self.mean_loss = MeanMetric()
        self.mean_of_samples = MeanMetric()
        self.cat = CatMetric()
        self.collection = MetricCollection(
            {"right": BinaryAccuracy(), "precision": BinaryPrecision()}, postfix="_updated"
        )
        self.forwarded = MetricCollection(
            {"right": BinaryAccuracy(), "precision": BinaryPrecision()}, postfix="_called"
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets, counts = batch["a"] if self.several else batch
        scores = self.layer(inputs).squeeze(1)
        losses = (scores - targets).square()
        loss = losses.mean()
        self.log("step", loss, on_step=True, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("counted", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(inputs))
        self.log("mean_of_steps", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        self.log("mean_of_eights", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=8)
        tokens = (losses * counts).sum() / counts.sum()
        self.log("tokens", tokens, on_step=False, on_epoch=True, sync_dist=True, batch_size=int(counts.sum()))
        self.log_dict(
            {"sum": losses.sum(), "num": float(len(inputs))},
            on_step=True,
            on_epoch=True,
            sync_dist=True,
            reduce_fx="sum",
        )
        self.log("right", ((scores > 0.5) == (targets > 0)).sum(), on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("max", losses.max(), on_step=True, on_epoch=True, sync_dist=True, reduce_fx="max")
        self.log("min", losses.min(), on_step=True, on_epoch=True, sync_dist=True, reduce_fx="min")
        self.log("constant", 0.25, on_step=True, on_epoch=True, sync_dist=True)
        labels, probabilities = (targets > 0).long(), scores.sigmoid().detach()
        self.log("accuracy_of_step", self.accuracy(probabilities, labels), on_step=True, sync_dist=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.auroc.update(probabilities, labels)
        self.synced(scores.detach(), targets)
        self.log("mse", self.synced, on_step=True, on_epoch=True)
        self.mean_loss(loss.detach())
        self.log("mean_loss", self.mean_loss, on_step=False, on_epoch=True)
        self.mean_of_samples.update(loss.detach(), weight=len(inputs))
        self.cat.update(losses.detach())
        self.collection.update(probabilities, labels)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        self.forwarded(probabilities, labels)
        self.log_dict(self.forwarded, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("in_module", outputs["loss"], on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_start(self) -> None:
        self.log("at_start", float(self.current_epoch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("auroc", self.auroc.compute())
        self.log("mean_of_samples", self.mean_of_samples.compute())
        self.log("cat", self.cat.compute().square().sum())
        self.log("at_end", 2.0, sync_dist=True)
        for metric in (self.auroc, self.mean_of_samples, self.cat):
            metric.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if not self.automatic_optimization:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "epoch"}}


class LogsInCallback(Callback):
    """Logs what the step returned, and updates a metric of its own."""

    def __init__(self) -> None:
        self.metric = MeanMetric()
        self.means: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("in_callback", outputs["loss"], on_step=True, on_epoch=True, sync_dist=True)
        self.metric.update(outputs["loss"].detach())

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.means.append(float(self.metric.compute()))
        self.metric.reset()


class Stream(IterableDataset[Any]):
    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from (self.samples[index] for index in range(len(self.samples)))


def samples(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(num)
    inputs = torch.randn(num, FEATURES, generator=generator)
    targets = (inputs.sum(dim=1) + torch.randn(num, generator=generator) > 0).float()
    return TensorDataset(inputs, targets, torch.randint(1, 9, (num,), generator=generator))


def fit(label: str, devices: int, num: int, batch_size: int, **variant: Any) -> dict[str, Any]:
    """Fit for three epochs on `num` samples; return everything that was logged, and what depends on it.

    Args:
        label: the label of the case.
        devices: the number of ranks.
        num: the number of samples.
        batch_size: the number of samples in a batch of all ranks.
        variant: `manual`, `accumulate`, `iterable`, `several` loaders of equal sizes, `workers`.
    """
    torch.manual_seed(4)
    manual, several = variant.get("manual", False), variant.get("several", False)
    module, in_callback = LogsEverything(manual, several), LogsInCallback()
    if not torch.distributed.is_initialized():
        folder = tempfile.mkdtemp()
    else:
        shared = [tempfile.mkdtemp()]
        torch.distributed.broadcast_object_list(shared)
        folder = shared[0]
    stopping = EarlyStopping("both_epoch", min_delta=0.1, patience=1, check_on_train_epoch_end=True)
    best = ModelCheckpoint(folder, filename="best", monitor="mean_of_steps_epoch", save_on_train_epoch_end=True)
    trainer = quiet_trainer(
        strategy=strategy_of(label, **({} if label in ("one process", "paral_dp") else {"split": "global"})),
        devices=devices,
        max_epochs=3,
        callbacks=[in_callback, stopping, best],
        logger=CSVLogger(folder, "logs", version=0),
        enable_checkpointing=True,
        log_every_n_steps=1,
        accumulate_grad_batches=variant.get("accumulate", 1),
    )
    dataset: Any = Stream(samples(num)) if variant.get("iterable") else samples(num)
    loader: Any = DataLoader(dataset, batch_size, num_workers=variant.get("workers", 0))
    if several:
        loader = {"a": loader, "b": DataLoader(samples(num), batch_size)}
    trainer.fit(module, loader)
    rows = []
    if trainer.global_rank == 0:
        with open(Path(folder, "logs/version_0/metrics.csv")) as file:
            rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return {
        "rows": rows,
        "callback": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "logged": {key: float(value) for key, value in trainer.logged_metrics.items()},
        "bar": {key: float(value) for key, value in trainer.progress_bar_metrics.items()},
        "in_callback": in_callback.means,
        "stopped": (trainer.current_epoch, float(stopping.best_score)),
        "best": float(best.best_model_score),
        "lr": trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None,
    }
