"""`load_from_checkpoint` accepts folders: verified, and without a second copy of any tensor in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from lightning_paral import CheckpointError, MissingCheckpointError
from lightning_paral.checkpoint import lazy_tensor as stored
from tests.running import SaveAt, quiet_trainer


class Wide(LightningModule):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 3))

    def training_step(self, batch: Any, _: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Data(LightningDataModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(8, 6), self.hparams["size"])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def fit_on_rank(strategy: str, path: str) -> dict[str, Any]:
    module = Wide(7)
    quiet_trainer(strategy=strategy, devices=2, max_steps=1, callbacks=[SaveAt(1, path)]).fit(
        module, datamodule=Data(4)
    )
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("strategy", ["paral_fsdp", "paral_zero3"])
def test_module_is_loaded_from_a_folder(on_ranks, tmp_path: Path, strategy: str, monkeypatch: Any) -> None:
    path = tmp_path / "x.ckpt"
    expected = on_ranks(2, fit_on_rank, strategy, str(path))[0]
    assert path.is_dir()

    def refuse(*_: Any) -> None:
        raise AssertionError("a tensor was read beside the one it is loaded into")

    with monkeypatch.context() as patched:
        patched.setattr(stored, "materialize", refuse)
        loaded = Wide.load_from_checkpoint(path)
    assert loaded.hparams["width"] == 7
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert type(found[name]) is torch.Tensor
        assert torch.equal(found[name], value)
    if strategy == "paral_zero3":
        return

    (tmp_path / "hparams.yaml").write_text("width: 7\n")
    assert Wide.load_from_checkpoint(str(path), hparams_file=tmp_path / "hparams.yaml").net[0].out_features == 7
    assert all(value.is_meta for value in Wide.load_from_checkpoint(path, map_location="meta").parameters())
    assert not any(v.is_meta for v in Wide.load_from_checkpoint(path, map_location=lambda s, _: s).parameters())
    with pytest.raises(RuntimeError, match="size mismatch"):
        Wide.load_from_checkpoint(path, width=9)
    with pytest.raises(FileNotFoundError):
        Wide.load_from_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        Wide.load_from_checkpoint(tmp_path)
    data = next(path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="damaged"):
        Wide.load_from_checkpoint(path)


def test_data_module_is_loaded_from_a_folder(tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy="paral_fsdp", devices=1, max_steps=1, enable_checkpointing=True)
    trainer.fit(Wide(), datamodule=Data(4))
    trainer.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    loaded = Data.load_from_checkpoint(tmp_path / "x.ckpt")
    assert loaded.hparams["size"] == 4
    assert loaded.seen == 7


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp"])
def test_missing_checkpoint_raises_the_error_of_lightning(tmp_path: Path, strategy: str) -> None:
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=1)
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found") as raised:
        trainer.fit(Wide(), datamodule=Data(4), ckpt_path=tmp_path / "no")
    assert isinstance(raised.value, MissingCheckpointError)


def test_assigning_unread_tensors_is_refused() -> None:
    tensor = stored.LazyTensor((2,), torch.float32, [])
    with pytest.raises(RuntimeError, match="assign=True"):
        nn.Linear(2, 2).load_state_dict({"weight": tensor, "bias": tensor}, strict=False, assign=True)
