"""A user's `CheckpointIO` is called under DDP and DP as under Lightning's ddp."""

from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_paral import ConfigurationError
from tests.running import quiet_trainer


class Recorded(TorchCheckpointIO):
    """Writes to another path, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.calls.append(("save", Path(path).name, storage_options))
        super().save_checkpoint(checkpoint, f"{path}.elsewhere")

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        self.calls.append(("load", Path(path).name, map_location, weights_only))
        return super().load_checkpoint(f"{path}.elsewhere", weights_only=False)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", Path(path).name))
        super().remove_checkpoint(f"{path}.elsewhere")

    def teardown(self) -> None:
        self.calls.append(("teardown",))


def run(strategy: str, folder: Path) -> Any:
    io = Recorded()
    saves = ModelCheckpoint(folder, filename="{step}", save_top_k=1, monitor="step", mode="max")
    options: dict[str, Any] = {"strategy": strategy, "devices": 1, "plugins": [io], "enable_checkpointing": True}
    trainer = quiet_trainer(max_epochs=2, limit_train_batches=1, limit_val_batches=0, callbacks=[saves], **options)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(folder / "own", weights_only=True, storage_options={"given": 1})
    options |= {"plugins": [io], "enable_checkpointing": False}
    again = quiet_trainer(max_epochs=3, limit_train_batches=1, limit_val_batches=0, **options)
    again.fit(BoringModel(), ckpt_path=folder / "step=2.ckpt", weights_only=False)
    return io.calls, sorted(path.name for path in folder.iterdir()), again.global_step


def test_calls_equal_those_under_lightnings_ddp(tmp_path: Path) -> None:
    expected = run("ddp", tmp_path / "ddp")
    assert ("remove", "step=1.ckpt") in expected[0]
    assert ("save", "own", {"given": 1}) in expected[0]
    for strategy in ("paral_ddp", "paral_dp"):
        assert run(strategy, tmp_path / strategy) == expected


def test_asynchronous_saving_is_waited_for(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    options: dict[str, Any] = {"plugins": [AsyncCheckpointIO()], "callbacks": [saves], "enable_checkpointing": True}
    trainer = quiet_trainer(strategy="paral_ddp", devices=1, max_steps=2, limit_val_batches=0, **options)
    trainer.fit(BoringModel())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=1.ckpt", "step=2.ckpt"]


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp"])
def test_storage_options_without_checkpoint_io_are_refused(tmp_path: Path, strategy: str) -> None:
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=1, limit_val_batches=0)
    trainer.fit(BoringModel())
    with pytest.raises(TypeError, match="storage_options") as raised:
        trainer.save_checkpoint(tmp_path / "x", weights_only=True, storage_options={"given": 1})
    assert isinstance(raised.value, ConfigurationError)
