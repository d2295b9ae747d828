"""Checkpoints can be saved in the last hooks of a fit and after it, under every strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_paral import CheckpointOptions
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.exchange import RankGroup
from tests.contract.cases import OWN_CASES, labels, strategy_of, with_ranks
from tests.models.resumable import Resumable
from tests.running import quiet_trainer

CASES = [
    *((label, 2) for label in labels(with_ranks(OWN_CASES, 2)) if label.startswith("paral_") and "nvme" not in label),
    ("paral_dp", 2),
]
BATCHES = 4
IN_HOOKS = ("on_train_end", "on_fit_end", "teardown")
AFTER = ("after", "after-test")


class Checked(Resumable):
    interrupted = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.interrupted and batch_idx == BATCHES - 1:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self(torch.ones(2, 5, device=self.device)).mean(), sync_dist=True)


class Saves(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / "on_train_end.ckpt")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder / "on_fit_end.ckpt")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            trainer.save_checkpoint(self.folder / "teardown.ckpt")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint(self.folder / "on_exception.ckpt")


def made_trainer(strategy: str, num_devices: int, folder: Path, *, in_background: bool) -> Trainer:
    made = strategy_of(strategy, checkpoint=CheckpointOptions(async_save=in_background))
    return quiet_trainer(
        strategy=made, devices=num_devices, max_epochs=1, callbacks=[Saves(folder)], use_distributed_sampler=False
    )


def save_everywhere(strategy: str, num_devices: int, name: str, *, in_background: bool) -> dict[str, Any]:
    folder = Path(name)
    torch.manual_seed(3)
    module = Checked()
    batches: Any = DataLoader(range(BATCHES))  # type: ignore[arg-type]
    trainer = made_trainer(strategy, num_devices, folder, in_background=in_background)
    trainer.fit(module, batches)
    seen: dict[str, Any] = {
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "scheduled": [rate for config in trainer.lr_scheduler_configs for rate in config.scheduler.get_last_lr()],
        "states": [len(optimizer.state) for optimizer in trainer.optimizers],
    }
    trainer.save_checkpoint(folder / "after.ckpt")
    trainer.test(module, batches, verbose=False)
    trainer.save_checkpoint(folder / "after-test.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    module = Checked()
    module.interrupted = True
    trainer = made_trainer(strategy, num_devices, folder, in_background=in_background)
    with pytest.raises(SystemExit):
        trainer.fit(module, batches)
    return seen


@pytest.mark.parametrize("in_background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("strategy", "num_devices"), CASES)
def test_checkpoints_of_hooks_and_after_the_fit_are_equal(
    on_ranks, rank_pool, tmp_path: Path, strategy: str, num_devices: int, in_background: bool
) -> None:
    num_ranks = 1 if strategy == "paral_dp" else num_devices
    for seen in on_ranks(num_ranks, _save, strategy, num_devices, str(tmp_path), in_background):
        assert seen["rates"] == seen["scheduled"]
        assert seen["states"] == [8], "one state per trained parameter"
    rank_pool.renew_world()
    expected = load(tmp_path / "on_train_end.ckpt", RankGroup())
    assert expected["global_step"] == BATCHES
    assert len(expected["optimizer_states"][0]["state"]) == 8
    for name in (*IN_HOOKS[1:], *AFTER, "weights"):
        found = load(tmp_path / f"{name}.ckpt", RankGroup())
        assert found["global_step"] == BATCHES, name
        assert_equal(found["state_dict"], expected["state_dict"])
        if name != "weights":
            assert_equal(found["optimizer_states"][0]["state"], expected["optimizer_states"][0]["state"])
            assert found["lr_schedulers"] == expected["lr_schedulers"], name
    interrupted = load(tmp_path / "on_exception.ckpt", RankGroup())
    assert interrupted["global_step"] == BATCHES - 1
    assert interrupted["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"] == BATCHES - 1
    assert len(interrupted["optimizer_states"][0]["state"]) == 8


def _save(strategy: str, num_devices: int, folder: str, in_background: bool) -> dict[str, Any]:
    return save_everywhere(strategy, num_devices, folder, in_background=in_background)


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    else:
        torch.testing.assert_close(torch.as_tensor(found[...]), torch.as_tensor(expected[...]), rtol=0.0, atol=0.0)
