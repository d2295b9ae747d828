"""Means over samples, or over the targets of a cross entropy, train as in one process; other losses are refused."""

import random
from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, nll_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_paral import ConfigurationError, ParalDDPStrategy, ParalPipelineStrategy
from tests.models.chain import WIDTH, Block, Losses
from tests.running import assert_same_fit, quiet_trainer

TOKENS = 12
LENGTH = 10
BATCH_SIZE = 8
IGNORED = -100


class Padded(LightningModule):
    """A language model, whose labels are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self(x).flatten(0, 1), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("number", loss.item(), batch_size=len(batch[0]), on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Weighted(Padded):
    """Weighs the classes, of which it leaves one out, and smooths the labels of a sequence as of an image."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = torch.linspace(0.0, 2.0, TOKENS)
        return 0.5 * cross_entropy(self(x).transpose(1, 2), y, weights, label_smoothing=0.1)


class Selects(Padded):
    """Selects the tokens itself, and has no cross entropy of samples without any."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, chosen = self(x.view(-1).view_as(x)), y != IGNORED
        if not chosen.any():
            return 0.0 * logits.sum()
        return nll_loss(logits[chosen].log_softmax(1), y[chosen])


class Masks(Padded):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        masked = torch.rand(x.shape) < 0.2
        return super().loss(x * ~masked, torch.where(masked, x, IGNORED))


class Divides(Padded):
    """Computes the mean over tokens itself."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        chosen = y != IGNORED
        return (cross_entropy(self(x).transpose(1, 2), y, reduction="none") * chosen).sum() / chosen.sum()


class Denoises(Padded):
    """Draws noise and its scale for each sample, and a number for all."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(len(x), LENGTH, TOKENS)
        scale = torch.randint(1, 5, (len(x), 1, 1)) * random.choice([1.0, 2.0])
        return mse_loss(self(x), noise * scale)


class Remembers(Padded):
    """Keeps the state of a recurrent layer from batch to batch, if it has as many samples."""

    state: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        fits = self.state is not None and self.state.size(1) == len(x)
        embedded, state = self.layer(self.first(x), self.state if fits else None)
        self.state = state.detach()
        for block in self.blocks:
            embedded = block(embedded)
        return self.out(embedded)


def fit(
    world_size: int, make: Any, strategy: Any, without_targets: int = 0, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Fit on batches whose first two samples have equally many targets, and of which one sample has none.

    The first samples, `without_targets`, have none either.
    """
    seed_everything(1)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(1, TOKENS, (4 * BATCH_SIZE, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH, (4 * BATCH_SIZE,), generator=generator)
    lengths.view(4, BATCH_SIZE)[:, :2], lengths[5] = LENGTH, 0
    lengths[:without_targets] = 0
    labels = inputs.roll(-1, 1).masked_fill(torch.arange(LENGTH) >= lengths[:, None], IGNORED)
    module, losses = make(), Losses()
    trainer = quiet_trainer(devices=world_size, strategy=strategy, max_epochs=1, callbacks=[losses], **options)
    trainer.fit(module, DataLoader(TensorDataset(inputs, labels), BATCH_SIZE))
    logged = {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}
    return losses.values, logged | {name: value.detach().clone() for name, value in module.state_dict().items()}


@cache
def in_one_process(make: Any) -> Any:
    return fit(1, make, "auto")


def test_samples_without_targets_may_be_compared_first(on_ranks) -> None:
    ranks = on_ranks(2, fit, 2, Padded, ParalPipelineStrategy(micro_batches=3), 3)

    assert_same_fit(ranks, fit(1, Padded, "auto", 3))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Padded, {}),
        (Padded, {"micro_batches": 3, "schedule": "gpipe"}),
        (Weighted, {"micro_batches": 3}),
        (Selects, {}),
        (Masks, {}),
        (Remembers, {"micro_batches": 1}),
    ],
)
def test_losses_and_weights_are_those_of_one_process(on_ranks, make: Any, options: dict[str, Any]) -> None:
    assert_same_fit(on_ranks(2, fit, 2, make, ParalPipelineStrategy(**options)), in_one_process(make))


def fit_accumulating(world_size: int, strategy: Any) -> Any:
    return fit(world_size, Padded, strategy, accumulate_grad_batches=2, gradient_clip_val=0.1)


def test_replicas_average_their_means_as_those_of_ddp(on_ranks) -> None:
    (losses, expected), *others = on_ranks(2, fit_accumulating, 2, ParalDDPStrategy(split="global"))
    mean = torch.tensor([losses, *(of_rank for of_rank, _ in others)]).mean(dim=0).tolist()
    for name in ("loss", "number"):  # logged without sync_dist
        del expected[name]

    ranks = on_ranks(4, fit_accumulating, 4, ParalPipelineStrategy(stages=2, split="global"))

    for _, found in ranks:
        del found["loss"], found["number"]
    assert_same_fit(ranks, (mean, expected))


def outcome(make: Any, **options: Any) -> str:
    try:
        fit(2, make, ParalPipelineStrategy(**options))
    except ConfigurationError as error:
        return str(error)
    except RuntimeError as error:
        return f"{error} {error.__notes__}"
    return "trained"


def test_other_means_are_refused(on_ranks) -> None:
    assert all("is not a mean over samples" in each for each in on_ranks(2, outcome, Divides))


@pytest.mark.parametrize("stages", [1, 2])
def test_means_over_samples_of_random_numbers_are_not_refused(on_ranks, stages: int) -> None:
    assert on_ranks(2, partial(outcome, stages=stages), Denoises) == ["trained", "trained"]


def test_state_of_batches_is_named(on_ranks) -> None:
    depends = "it depends on the batch before, such as by a hidden state or a counter in an attribute"
    assert all(depends in each and "Set micro_batches=1" in each for each in on_ranks(2, outcome, Remembers))


class Averages(Padded):
    """Averages losses, weighted by the numbers of samples in the step, and of each batch after it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.of_batches = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch[0]), nn.functional.one_hot(batch[0], TOKENS).float())
        self.mean.update(loss.detach(), weight=len(batch[0]))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.of_batches.update(outputs["loss"])

    def on_train_epoch_end(self) -> None:
        self.log("of_batches", self.of_batches.compute())


def means_of(world_size: int, strategy: Any) -> list[float]:
    logged = fit(world_size, Averages, strategy)[1]
    return [float(logged["mean"]), float(logged["of_batches"])]


def test_mean_metrics_as_the_limits_recommend_are_those_of_one_process(on_ranks) -> None:
    expected = means_of(1, "auto")

    for found in on_ranks(2, means_of, 2, ParalPipelineStrategy(micro_batches=3)):
        assert found == pytest.approx(expected, rel=1e-6)
