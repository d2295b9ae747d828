"""Resumed weights and states of callbacks are restored before `on_fit_start`, as under Lightning's ddp."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader

from lightning_paral.model.deferred import recorder
from tests.running import quiet_trainer

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
        self.loads: list[str] = []
        self.late = late
        if not late:
            self.build()

    def build(self) -> None:
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.head = nn.Linear(6, 1)

    def configure_model(self) -> None:
        if self.late and not hasattr(self, "head"):
            self.build()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loads.append("module")

    def training_step(self, batch: Any, _: int) -> Any:
        return self.head(self.backbone(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1, momentum=0.9)


class SaveAtEnd(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def run_late(strategy: str, path: str) -> Any:
    with pytest.MonkeyPatch.context() as as_if_large:
        as_if_large.setattr(recorder, "DEFERRED_BYTES", 0)
        return run(strategy, path, late=True)


def run(strategy: str, path: str, late: bool = False) -> Any:
    saved, module, counting = Tuned(late), Tuned(late), Counting()
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, callbacks=[Counting(), SaveAtEnd(path)])
    trainer.fit(saved, DataLoader(DATA, 4))
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=2, callbacks=[counting])
    trainer.fit(module, DataLoader(DATA, 4), ckpt_path=path)
    return counting.at_start, saved.head.weight.flatten().tolist(), module.loads


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3"])
def test_weights_and_states_are_there_before_fit_starts(on_ranks, tmp_path: Path, strategy: str) -> None:
    for (batches, weight), expected, loads in on_ranks(2, run, strategy, str(tmp_path / "x.ckpt")):
        assert batches == 2
        assert weight == pytest.approx(expected, rel=1e-6)
        assert loads == ["module"]


@pytest.mark.parametrize("strategy", ["paral_fsdp", "paral_zero3"])
def test_sharded_parameters_are_loaded_after_fit_starts(on_ranks, tmp_path: Path, strategy: str) -> None:
    for (batches, weight), expected, loads in on_ranks(2, run_late, strategy, str(tmp_path / "x.ckpt")):
        assert batches == 0  # as under Lightning's own strategies of this kind
        assert weight != pytest.approx(expected, rel=1e-3)
        assert loads == ["module"]


def finetune(strategy: str, path: str) -> Any:
    ends = []
    for epochs, resumed in ((2, None), (4, path), (4, None)):
        callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05)]
        saves = [SaveAtEnd(path)] if epochs == 2 else []
        module = Tuned()
        trainer = quiet_trainer(strategy=strategy, devices=1, max_epochs=epochs, callbacks=[*callbacks, *saves])
        trainer.fit(module, DataLoader(DATA, 4), ckpt_path=resumed)
        ends.append({name: value.clone() for name, value in module.state_dict().items()})
    return ends[1:]


def test_finetuning_resumes_as_under_ddp(tmp_path: Path) -> None:
    pairs = [finetune(strategy, str(tmp_path / strategy)) for strategy in ("paral_ddp", "paral_fsdp")]
    for name, value in pairs[0][0].items():
        assert torch.allclose(pairs[1][0][name], value, atol=1e-6), name
