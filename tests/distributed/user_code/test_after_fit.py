"""After a failure ranks save together, and the next run reuses or replaces the process group."""

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy
from lightning_paral.distributed.process_group import owned_group
from lightning_paral.errors import RankFailedError
from tests.launching import leave_pool
from tests.models.regression import FEATURES, GLOBAL_BATCH_SIZE, Fitted, Regression
from tests.running import quiet_trainer

BATCHES = 3


def shuffled(num_ranks: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(BATCHES * GLOBAL_BATCH_SIZE, FEATURES, generator=generator)
    targets = torch.stack([inputs.sum(dim=1), inputs.prod(dim=1)], dim=1)
    return DataLoader(TensorDataset(inputs, targets), GLOBAL_BATCH_SIZE // num_ranks, shuffle=True)


def fitted(strategy: Any, num_ranks: int, ckpt_path: str | None = None) -> Fitted:
    torch.manual_seed(3)
    model = Regression()
    trainer = quiet_trainer(strategy=strategy, devices=num_ranks, max_epochs=1)
    trainer.fit(model, shuffled(num_ranks), ckpt_path=ckpt_path)
    return model.losses, {name: weight.detach().clone() for name, weight in model.state_dict().items()}


class Failing(Regression):
    """Fails inside its third step; with `where="alone"` on rank 1 only, with `where="interrupted"` as after Ctrl+C."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and (self.where != "alone" or self.global_rank == 1):
            self.hidden(batch[0])
            if self.where == "interrupted":
                raise KeyboardInterrupt
            raise KeyError(f"of rank {self.global_rank}")
        return super().training_step(batch, batch_idx)


class SavesOnException(Callback):
    """Saves on an exception, as users write it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint(f"{self.folder}/own.ckpt")


def fail(strategy: str, where: str, folder: str, every_n_train_steps: int | None = None) -> str:
    torch.manual_seed(3)
    checkpoint = ModelCheckpoint(
        folder,
        "failed",
        save_on_exception=True,
        save_last="link",
        save_top_k=-1,
        every_n_train_steps=every_n_train_steps,
    )
    callbacks = [checkpoint, SavesOnException(folder)]
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1, enable_checkpointing=True, callbacks=callbacks)
    try:
        trainer.fit(Failing(where), shuffled(2))
    except (KeyError, RankFailedError, SystemExit) as error:
        return type(error).__name__
    return "no error"


def resumed_and_uninterrupted(strategy: str, folder: str) -> list[Fitted]:
    losses, weights = fitted(strategy, 2)
    return [(losses[2:], weights), *(fitted(strategy, 2, f"{folder}/{name}.ckpt") for name in ("failed", "own"))]


def fail_and_be_warned(folder: str) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raised = fail("paral_fsdp", "alone", folder, every_n_train_steps=2)
    return raised, [str(each.message) for each in caught if "was not saved" in str(each.message)]


def test_checkpoint_is_not_saved_if_ranks_hold_shards_and_one_fails_alone(in_own_world, tmp_path: Path) -> None:
    (first, told), (second, nothing) = in_own_world(2, fail_and_be_warned, str(tmp_path))

    assert [first, second] == ["RankFailedError", "KeyError"]
    (why,) = told
    assert why.startswith(f"{tmp_path}/own.ckpt was not saved after the failure: each rank holds a shard")
    assert why.endswith(f"The newest checkpoint is {tmp_path}/last.ckpt.")
    assert not nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed.ckpt", "last.ckpt"]


@pytest.mark.parametrize(
    ("strategy", "where", "raised"),
    [
        ("paral_ddp", "all", "KeyError"),
        ("paral_zero3", "all", "KeyError"),
        ("paral_fsdp", "interrupted", "SystemExit"),
    ],
)
def test_ranks_save_together_after_an_error_and_raise_it(
    on_ranks, rank_pool, tmp_path: Path, strategy: str, where: str, raised: str
) -> None:
    assert on_ranks(2, fail, strategy, where, str(tmp_path)) == [raised, raised]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed.ckpt", "last.ckpt", "own.ckpt"]

    rank_pool.renew_world()
    for uninterrupted, *others in on_ranks(2, resumed_and_uninterrupted, strategy, str(tmp_path)):
        for resumed in others:
            torch.testing.assert_close(resumed, uninterrupted, rtol=1e-5, atol=1e-6)


def change_groups() -> list[bool]:
    leave_pool()

    def hybrid(minutes: int) -> dict[str, Tensor]:
        strategy = ParalFSDPStrategy(replicate=2, units=["Linear"], timeout=timedelta(minutes=minutes))
        return fitted(strategy, 4)[1]

    before = hybrid(3)
    first = dist.group.WORLD
    fitted(ParalDDPStrategy(timeout=timedelta(minutes=4)), 4)
    second = dist.group.WORLD
    for ranks in ([0, 1], [2, 3]):  # different groups than in the first default group, with ranks of the mesh
        dist.new_group(ranks)
        if dist.get_rank() in ranks:
            dist.new_group(ranks, use_local_synchronization=True)
    after = hybrid(4)
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)
    return [first is not second, second is dist.group.WORLD, owned_group() is second]


def test_process_group_is_reused_by_the_next_run_or_replaced(in_own_world) -> None:
    assert in_own_world(4, change_groups) == [[True, True, True]] * 4
