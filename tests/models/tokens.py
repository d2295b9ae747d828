"""Batches of tokens, the base class of modules that train on them, and a function that fits these."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_paral  # noqa: F401
from tests.running import quiet_trainer

GLOBAL_BATCH_SIZE = 8
LENGTH = 6
VOCABULARY = 20


class Fitted(LightningModule):
    """Base class: AdamW with one learning rate, and a list of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def tokens(num_batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    return TensorDataset(torch.randint(VOCABULARY, (num_batches * GLOBAL_BATCH_SIZE, LENGTH), generator=generator))


def token_loader(num_batches: int, num_ranks: int) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of batches in order, with which `num_ranks` ranks draw `num_batches` global batches."""
    return DataLoader(tokens(num_batches), GLOBAL_BATCH_SIZE // num_ranks)


class BatchStream(torch.utils.data.IterableDataset[list[Tensor]]):
    """Yields the same batches, for a loader with `batch_size=None`."""

    def __init__(self, num_batches: int, num_ranks: int) -> None:
        self.num_batches = num_batches
        self.num_ranks = num_ranks

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batch in tokens(self.num_batches).tensors[0].split(GLOBAL_BATCH_SIZE // self.num_ranks):
            yield [batch]


def fit(
    make: Callable[[], Fitted], num_batches: int, num_ranks: int, loader: Any = None, **trainer_options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Fit the module that `make` returns; return this rank's losses and the final weights."""
    torch.manual_seed(5)
    model = make()
    trainer = quiet_trainer(**({"max_epochs": 1, "devices": num_ranks} | trainer_options))
    trainer.fit(model, token_loader(num_batches, num_ranks) if loader is None else loader)
    return model.losses, {name: weight.detach().clone() for name, weight in model.state_dict().items()}
