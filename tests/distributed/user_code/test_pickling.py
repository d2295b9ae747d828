"""Trainers, callbacks and loaders can be pickled and copied after a run, and loaders also during one."""

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from tests.running import quiet_trainer


def rows(loader: Any) -> list[list[float]]:
    """Return the first features of all batches."""
    return [getattr(batch, "batch", batch)[:, 0].tolist() for batch in loader]


class Copies(Callback):
    """Copies the loaders during a run."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        loader = trainer.train_dataloader
        self.copied, self.pickled = copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))
        self.evaluated = copy.deepcopy(trainer.val_dataloaders)

    def __getstate__(self) -> dict[str, Any]:
        return {}


def run(strategy: str) -> Any:
    data = torch.randn(10, 32, generator=torch.Generator().manual_seed(5))
    bar, copies = TQDMProgressBar(), Copies()
    trainer = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=1, callbacks=[bar, copies], enable_progress_bar=True
    )
    loaders = DataLoader(data, 2, shuffle=True), DataLoader(data, 2)
    trainer.fit(BoringModel(), *loaders)
    pickle.loads(pickle.dumps(bar))
    found = [rows(loader) for loader in (trainer.train_dataloader, copies.copied, copies.pickled, copies.evaluated)]
    kinds = {type(loader).__name__ for loader in (copies.copied, copies.pickled, copies.evaluated)}
    trainer.validate(BoringModel(), loaders[1], verbose=False)
    pickle.loads(pickle.dumps(bar))
    return found, kinds, len(pickle.dumps(trainer)) > 0, copy.deepcopy(bar) is not bar


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero3"])
def test_copies_equal_the_originals(on_ranks, strategy: str) -> None:
    ranks = on_ranks(2, run, strategy)
    for found, kinds, pickled, copied in ranks:
        train, by_copy, by_pickle, evaluated = found
        assert kinds == {"DataLoader"}
        assert by_copy == by_pickle
        assert sorted(map(len, by_copy)) == sorted(map(len, train))
        assert len(evaluated) == 3
        assert pickled
        assert copied
    assert not {row for batch in ranks[0][0][1] for row in batch} & {
        row for batch in ranks[1][0][1][:2] for row in batch
    }
