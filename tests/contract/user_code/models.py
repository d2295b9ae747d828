"""Small modules for the rows, and data divided so that every strategy trains on the same global batches."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

GLOBAL_BATCH_SIZE = 12
NUM_BATCHES = 4
FEATURES = 5
WIDTH = 7
OUTPUTS = 3
Loaders = Callable[[int, int], dict[str, Any]]


class Share(DistributedSampler[Any]):
    """Yields the rank's consecutive samples of each global batch, in order.

    Strategies do not replace a DistributedSampler. Batches are divided as `paral_dp` divides them.
    """

    def __init__(self, dataset: Dataset[Any], num_ranks: int, rank: int, batch_size: int = GLOBAL_BATCH_SIZE) -> None:
        super().__init__(dataset, num_ranks, rank, shuffle=False)
        self.global_batch_size = batch_size

    def __iter__(self) -> Iterator[int]:
        share = self.global_batch_size // self.num_replicas
        for start in range(0, len(self.dataset), self.global_batch_size):  # type: ignore[arg-type]
            yield from range(start + self.rank * share, start + (self.rank + 1) * share)


def loader(*tensors: Tensor, rank: int, num_ranks: int, batch_size: int = GLOBAL_BATCH_SIZE) -> DataLoader[Any]:
    """Return a loader of this rank's samples of the global batches of `tensors`, in order."""
    dataset = TensorDataset(*tensors)
    return DataLoader(dataset, batch_size // num_ranks, sampler=Share(dataset, num_ranks, rank, batch_size))


def samples(num_batches: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_batches * GLOBAL_BATCH_SIZE, FEATURES, generator=generator)
    return inputs, torch.stack([inputs.sum(dim=1), inputs.prod(dim=1), inputs[:, 0]], dim=1)


def regression(rank: int, num_ranks: int) -> dict[str, Any]:
    """Return loaders with four training batches."""
    return {"train_dataloaders": loader(*samples(NUM_BATCHES, 7), rank=rank, num_ranks=num_ranks)}


def validated(rank: int, num_ranks: int) -> dict[str, Any]:
    """Return loaders with four training batches and two validation batches with different inputs."""
    inputs, targets = samples(2, 8)
    return regression(rank, num_ranks) | {
        "val_dataloaders": loader(inputs * 2 + 1, targets, rank=rank, num_ranks=num_ranks)
    }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Backbone(nn.Module):
    """Repeated blocks, which are units of FSDP, a matrix, a vector, and a 0-dimensional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x * self.gain / self.temperature


class Supervised(LightningModule):
    """The base class of most rows: a backbone and a head fitted to a function by SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.seen: list[Any] = []
        """Values that hooks read, which must equal those of one process on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class Normalized(Supervised):
    """Has BatchNorm between backbone and head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.backbone(x)))


class Every(Supervised):
    """Has a step for every stage."""

    test_step = Supervised.validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Manual(Supervised):
    """Manual optimization; `between` is called between backward and step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def between(self, optimizer: Any) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.between(optimizer)
        optimizer.step()
        return loss


class Momentum(Supervised):
    """Also has a target network, a frozen copy of the backbone, whose outputs the backbone approximates."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.backbone).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        features = self.backbone(inputs)
        with torch.no_grad():
            aims = self.target(inputs + 0.1)
        return nn.functional.mse_loss(self.head(features), targets) + nn.functional.mse_loss(features, aims)
