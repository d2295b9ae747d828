"""Rows about buffers: BatchNorm, codebooks, running statistics, counters."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.contract.user_code.columns import RANKS
from tests.contract.user_code.models import WIDTH, Normalized, Supervised, validated
from tests.contract.user_code.rows import row

row(
    "buffers of BatchNorm in validation",
    sentence="nn.BatchNorm1d; what validation logs, which uses running statistics.",
    reference="ddp",
    loaders=validated,
    trainer={"max_epochs": 2},
)(Normalized)


@row("buffers of BatchNorm read in hooks", reference="ddp", loaders=validated, apart=("rank 1: seen",))
class ReadStatistics(Normalized):
    """running_mean.sum() in on_validation_end and on_train_epoch_end."""

    def on_validation_end(self) -> None:
        self.seen.append(float(self.norm.running_mean.sum()))

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.norm.running_var.sum()))


@row("buffers of BatchNorm, frozen")
class FrozenStatistics(Normalized):
    """self.norm.eval() in on_train_epoch_start and on_train_batch_start (frozen BatchNorm of a detector)."""

    def on_train_epoch_start(self) -> None:
        self.norm.eval()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.norm.eval()


@row("buffer assigned in the step", reference="ddp")
class Assigned(Supervised):
    """self.mean = 0.9 * self.mean + 0.1 * features.mean(0) of a registered buffer (DINO's center)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def batch_mean(self, features: Any) -> Any:
        return features.mean(dim=0)

    def loss(self, batch: Any) -> Any:
        inputs, targets = batch
        features = self.backbone(inputs)
        self.mean = 0.9 * self.mean + 0.1 * self.batch_mean(features.detach())
        return nn.functional.mse_loss(self.head(features - self.mean), targets)


@row("buffer that counts steps")
class Counter(Supervised):
    """self.count += 1 of an integer buffer in the step; its value schedules the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return self.loss(batch) / self.count


@row("buffer written in hooks")
class InHooks(Supervised):
    """self.scale.copy_() and self.other = ... of buffers in on_train_batch_end; one is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("other", torch.ones(3), persistent=False)

    def loss(self, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs) * self.scale * self.other, targets)

    def on_train_batch_end(self, *args: Any) -> None:
        self.scale.mul_(0.9)
        self.other = self.other * 1.05


@row("buffer EMA of a parameter")
class OfParameter(Supervised):
    """buffer.lerp_(parameter.data, 0.5) and buffer = parameter.detach().clone() in on_train_batch_end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", self.head.weight.detach().clone())
        self.register_buffer("last", self.backbone.blocks[0].layer.weight.detach().clone())

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.lerp_(self.head.weight.data, 0.5)
        self.last = self.backbone.blocks[0].layer.weight.detach().clone()


@row(
    "buffer as a codebook, EMA of sums over ranks",
    # docs/limits.md: the sums of user code count a sample once for each rank that has it
    only=tuple(label for label in RANKS if label not in ("paral_tp", "paral_pp")),
    names="all_reduce",
)
class Codebook(Supervised):
    """VQ-VAE: a codebook in a buffer, EMA of counts and sums, all-reduced where ranks are; straight-through."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))
        self.register_buffer("sizes", torch.ones(4))
        self.register_buffer("sums", self.codes.clone())

    def loss(self, batch: Any) -> Any:
        inputs, targets = batch
        features = self.backbone(inputs)
        nearest = torch.cdist(features, self.codes).argmin(dim=1)
        chosen = nn.functional.one_hot(nearest, 4).float()
        quantized = features + (self.codes[nearest] - features).detach()
        loss = nn.functional.mse_loss(self.head(quantized), targets)
        loss = loss + nn.functional.mse_loss(features, self.codes[nearest].detach())
        with torch.no_grad():
            sizes, sums = chosen.sum(dim=0), chosen.T @ features
            if dist.is_initialized():
                dist.all_reduce(sizes)
                dist.all_reduce(sums)
            self.sizes.mul_(0.9).add_(0.1 * sizes)
            self.sums.mul_(0.9).add_(0.1 * sums)
            self.codes.copy_(self.sums / self.sizes[:, None])
        return loss


@row("buffer as a queue", names="all_gather")
class Queue(Supervised):
    """MoCo's queue: rows of a buffer overwritten from a pointer in a buffer, by all-gathered features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(36, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def loss(self, batch: Any) -> Any:
        inputs, targets = batch
        features = self.backbone(inputs)
        loss = (
            nn.functional.mse_loss(self.head(features), targets)
            + (features @ self.queue.clone().T).square().mean() * 0.01
        )
        every = self.all_gather(features.detach()).reshape(-1, WIDTH)  # in the order of the samples
        start = int(self.pointer)
        self.queue[start : start + len(every)] = every
        self.pointer[0] = (start + len(every)) % 36
        return loss


@row("attribute counted in the step")
class Attribute(Supervised):
    """self.count += 1 of a plain attribute in the step, whose value schedules the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return self.loss(batch) / self.count


@row("attribute list of outputs", loaders=validated)
class Outputs(Supervised):
    """self.outputs.append(loss) in the steps, its mean logged in on_train_epoch_end (Lightning 2's way)."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()
