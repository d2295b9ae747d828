"""Resumed weights and states of callbacks are restored before `on_fit_start`, as under Lightning's ddp."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_paral.model.deferred import recorder
from tests.running import SaveAt, quiet_trainer

DATA = torch.randn(16, 4, generator=torch.Generator().manual_seed(7))


class Counting(Callback):
    """Records in `on_fit_start` what has been restored."""

    def __init__(self) -> None:
        self.batches = 0
        self.at_start: Any = None

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        weight: Any = module.head.weight
        if hasattr(weight, "ds_id"):
            weight = trainer.strategy.full_parameter(weight)  # type: ignore[attr-defined]
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        self.at_start = self.batches, weight.detach().flatten().tolist()

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class Tuned(LightningModule):
    def __init__(self, late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_loads = 0
        if not late:
            self.head = nn.Linear(4, 1)

    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            self.head = nn.Linear(4, 1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_loads += 1

    def training_step(self, batch: Any, _: int) -> Any:
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def run(strategy: str, path: str, late: bool = False) -> Any:
    saved, module, counting = Tuned(late), Tuned(late), Counting()
    with pytest.MonkeyPatch.context() as as_if_large:
        if late:
            as_if_large.setattr(recorder, "DEFERRED_BYTES", 0)
        trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[Counting(), SaveAt(2, path)])
        trainer.fit(saved, DataLoader(DATA, 4))
        trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=2, callbacks=[counting])
        trainer.fit(module, DataLoader(DATA, 4), ckpt_path=path)
    return counting.at_start, saved.head.weight.flatten().tolist(), module.num_loads


@pytest.mark.parametrize(
    ("strategy", "late"),
    [
        *((strategy, False) for strategy in ("paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3")),
        *((strategy, True) for strategy in ("paral_fsdp", "paral_zero3")),
    ],
)
def test_weights_and_states_are_there_before_fit_starts(on_ranks, tmp_path: Path, strategy: str, late: bool) -> None:
    for (batches, weight), expected, num_loads in on_ranks(2, run, strategy, str(tmp_path / "x.ckpt"), late):
        assert batches == (0 if late else 2)  # if late, as under Lightning's own strategies of this kind
        assert (weight == pytest.approx(expected, rel=1e-3)) is not late
        assert num_loads == 1
