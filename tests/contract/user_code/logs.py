"""Rows about logging: per step, per epoch, over ranks, by some ranks, by metrics."""

from typing import Any

import torch
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.regression import MeanAbsoluteError, PearsonCorrCoef

from tests.contract.user_code.models import Supervised, validated
from tests.contract.user_code.rows import row


@row("logging per step and epoch", loaders=validated)
class StepAndEpoch(Supervised):
    """self.log(on_step=True, on_epoch=True, sync_dist=True) in the steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch), on_step=True, on_epoch=True, sync_dist=True)


@row("logging without sync_dist", loaders=validated)
class NoSync(Supervised):
    """self.log without sync_dist: each rank's own value, whose mean is the truth."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch))


@row("logging from rank 0 only", loaders=validated)
class RankZero(Supervised):
    """self.log(rank_zero_only=True) under if self.global_rank == 0."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 0:
            self.log("steps", float(self.global_step), rank_zero_only=True)


@row("logging keys that depend on the rank", names=r"\.of_0", patience=60)
class RankKeys(Supervised):
    """self.log(f"loss_of_{something that depends on the rank's batch}", sync_dist=True)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log(f"of_{self.global_rank}", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss


@row("metrics of torchmetrics", loaders=validated)
class Metrics(Supervised):
    """torchmetrics as attributes, logged as objects, and a MetricCollection."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.both = MetricCollection([MeanAbsoluteError(), PearsonCorrCoef()], prefix="val_")
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.error(self(batch[0]), batch[1])
        self.log("train_error", self.error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        self.both.update(outputs[:, 0], batch[1][:, 0])
        self.log_dict(self.both)
        self.mean.update(outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()


@row("metrics without reset, persistent", reference="ddp", apart=("rank 1: weights: error",))
class PersistentMetric(Supervised):
    """A metric with persistent states, in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.error.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.error.update(self(batch[0]).detach(), batch[1])
        return self.loss(batch)

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.error.compute()))


@row("outputs gathered by self.all_gather", loaders=validated)
class Gathered(Supervised):
    """self.all_gather of outputs in on_validation_epoch_end, a metric of all of them."""

    def on_validation_epoch_start(self) -> None:
        self.outputs: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.outputs.append(self(batch[0]))

    def on_validation_epoch_end(self) -> None:
        every = self.all_gather(torch.cat(self.outputs)).reshape(-1, 3)
        self.log("largest", every.max())
        self.log("deviation", every.std(dim=0).mean())


@row("steps that return a dict")
class ReturnsDict(Supervised):
    """{"loss": loss, "features": tensor} from training_step, read in on_train_batch_end."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"loss": loss, "number": 1.0, "twice": loss.detach() * 2}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("twice", outputs["twice"].mean(), sync_dist=True, on_epoch=True, on_step=False)


@row("steps that return None", names="None")
class ReturnsNone(Supervised):
    """None from training_step in every second batch, on all ranks (skips it)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else self.loss(batch)


@row(
    "steps that return None on one rank", names="None", of_one_rank=True,
    only=("paral_dp", "paral_ddp", "paral_fsdp", "paral_zero2"),
)  # fmt: skip
class ReturnsNoneOnOne(Supervised):
    """None from training_step for a batch that one rank has (samples that are not finite)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 and self.global_rank == 1 else self.loss(batch)


@row("steps whose loss needs no gradient", names="[Gg]radients|backbone.blocks.0")
class NoGradient(Supervised):
    """A loss that is detached, in every second step with an added parameter of no effect."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss.detach() + 0 * sum(p.sum() for p in self.parameters()) if batch_idx % 2 else loss
