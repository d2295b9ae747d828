"""After a fit, saving, reading, copying and running again work as under Lightning's `ddp`, or are refused."""

import copy
import io
import os
import pickle
import socket
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

from lightning_paral import CheckpointOptions, ParalDDPStrategy, ParalFSDPStrategy
from lightning_paral.distributed.failures import reachable
from lightning_paral.distributed.process_group import owned_group
from lightning_paral.errors import RankFailedError
from tests.contract.cases import MAIN, labels, strategy_of, with_ranks
from tests.models.regression import FEATURES, GLOBAL_BATCH_SIZE, Regression
from tests.running import quiet_trainer

STRATEGIES = labels(with_ranks(MAIN, 2))
ALONE = [("paral_dp", 1), ("paral_fsdp", 1), ("paral_zero3", 1)]
BATCHES = 3


class Scheduled(Regression):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class SavesAtTheEnd(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(f"{self.folder}/fit-end.ckpt")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.save_checkpoint(f"{self.folder}/teardown.ckpt")


def shuffled(num_ranks: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(BATCHES * GLOBAL_BATCH_SIZE, FEATURES, generator=generator)
    targets = torch.stack([inputs.sum(dim=1), inputs.prod(dim=1)], dim=1)
    return DataLoader(TensorDataset(inputs, targets), GLOBAL_BATCH_SIZE // num_ranks, shuffle=True)


def fitted(strategy: Any, num_ranks: int, epochs: int, **options: Any) -> tuple[Trainer, Scheduled]:
    fit_options = {key: options.pop(key) for key in ("ckpt_path",) if key in options}
    torch.manual_seed(3)
    model = Scheduled()
    if isinstance(strategy, str):
        strategy = strategy_of(strategy)
    trainer = quiet_trainer(strategy=strategy, devices=num_ranks, max_epochs=epochs, **options)
    trainer.fit(model, shuffled(num_ranks), **fit_options)
    return trainer, model


def weights(model: LightningModule) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def after_fit(strategy: str, folder: str) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    _, uninterrupted = fitted(strategy, num_ranks, 2)
    trainer, model = fitted(strategy, num_ranks, 1, callbacks=[SavesAtTheEnd(folder)])
    (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
    own = {id(parameter) for parameter in model.parameters()}
    seen = {
        "own": all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]),
        "rates": [group["lr"] for group in model.optimizers().param_groups],
        "scheduled": config.scheduler.get_last_lr(),
        "copied": len(copy.deepcopy(trainer.optimizers)[0].state_dict()["state"]),
    }
    again = pickle.loads(pickle.dumps(optimizer))
    torch.save(optimizer.state_dict(), io.BytesIO())
    seen["pickled"] = len(again.state)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    (metrics,) = trainer.validate(model, shuffled(num_ranks), verbose=False)
    trainer.save_checkpoint(f"{folder}/after-validation.ckpt")
    (other,) = trainer.validate(model, shuffled(num_ranks), ckpt_path=f"{folder}/after.ckpt", verbose=False)
    seen["metrics"] = metrics == other
    ones = torch.ones(())
    dist.all_reduce(ones)
    seen["sum"] = ones.item()
    seen["resumed"] = []
    for name in ("fit-end", "after", "after-validation"):
        resumed, continued = fitted(strategy, num_ranks, 2, ckpt_path=f"{folder}/{name}.ckpt")
        seen["resumed"].append((resumed.global_step, continued.losses, weights(continued)))
    whole, known = fitted("paral_ddp", num_ranks, 1)
    expected = whole.optimizers[0].state[known.hidden.weight]["exp_avg"]
    found = trainer.strategy.full_optimizer_state(model.hidden.weight, "exp_avg")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, shuffled(num_ranks))  # on the same trainer
    seen["second"] = trainer.global_step
    return seen | {"losses": uninterrupted.losses[BATCHES:], "weights": weights(uninterrupted)}


def check_after_fit(seen: dict[str, Any], num_ranks: int) -> None:
    assert seen["own"]
    assert seen["rates"] == seen["scheduled"] == [0.005]
    assert seen["copied"] == seen["pickled"] == 4
    assert seen["metrics"]
    assert seen["sum"] == num_ranks
    assert seen["second"] == 2 * BATCHES
    for global_step, losses, found in seen["resumed"]:
        assert global_step == 2 * BATCHES
        torch.testing.assert_close(losses, seen["losses"], rtol=1e-5, atol=0.0)
        torch.testing.assert_close(found, seen["weights"], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize(("strategy", "num_ranks"), [*((name, 2) for name in STRATEGIES), *ALONE])
def test_checkpoint_saved_after_a_fit_resumes(on_ranks, tmp_path: Path, strategy: str, num_ranks: int) -> None:
    for seen in on_ranks(num_ranks, after_fit, strategy, str(tmp_path)):
        check_after_fit(seen, num_ranks)
    assert (tmp_path / "teardown.ckpt").exists()


def save_in_background_after(folder: str) -> list[str]:
    strategy = ParalFSDPStrategy(checkpoint=CheckpointOptions(form="sharded", async_save=True))
    trainer, _ = fitted(strategy, 2, 1)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    return [
        path.name for path in Path(folder, "after.ckpt").iterdir()
    ]  # returned without a wait for the background save


def test_save_after_the_run_is_complete_when_it_returns(on_ranks, tmp_path: Path) -> None:
    for names in on_ranks(2, save_in_background_after, str(tmp_path)):
        assert "manifest.json" in names


class Failing(Scheduled):
    """Fails inside its third step; with `where="alone"` on rank 1 only."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and (self.where == "all" or self.global_rank == 1):
            self.hidden(batch[0])
            raise KeyError(f"of rank {self.global_rank}")
        return super().training_step(batch, batch_idx)


class SavesOnException(Callback):
    """Saves on an exception, as users write it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.save_checkpoint(f"{self.folder}/own.ckpt")


def fail(strategy: str, where: str, folder: str) -> str:
    reachable.PATIENCE = timedelta(seconds=30)
    torch.manual_seed(3)
    checkpoint = ModelCheckpoint(folder, "failed", save_on_exception=True, save_last="link", save_top_k=-1)
    callbacks = [checkpoint, SavesOnException(folder)]
    trainer = quiet_trainer(
        strategy=strategy_of(strategy), devices=2, max_epochs=1, enable_checkpointing=True, callbacks=callbacks
    )
    try:
        trainer.fit(Failing(where), shuffled(2))
    except (KeyError, RankFailedError) as error:
        return f"{type(error).__name__} {sorted(path.name for path in Path(folder).iterdir())}"
    finally:
        reachable.PATIENCE = timedelta(seconds=10)
    return "no error"


def resumed_and_uninterrupted(strategy: str, folder: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    _, first = fitted(strategy, 2, 1)
    found = [(first.losses[2:], weights(first))]
    for name in ("failed", "own"):
        _, model = fitted(strategy, 2, 1, ckpt_path=f"{folder}/{name}.ckpt")
        found.append((model.losses, weights(model)))
    return found


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero1", "paral_zero3"])
def test_ranks_that_fail_together_save_and_raise_the_users_error(
    on_ranks, rank_pool, tmp_path: Path, strategy: str
) -> None:
    told = on_ranks(2, fail, strategy, "all", str(tmp_path))

    assert told == ["KeyError ['failed.ckpt', 'last.ckpt', 'own.ckpt']"] * 2
    rank_pool.renew_world()
    for uninterrupted, *others in on_ranks(2, resumed_and_uninterrupted, strategy, str(tmp_path)):
        for resumed in others:
            torch.testing.assert_close(resumed, uninterrupted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_fsdp", "paral_zero2"])
def test_ranks_save_together_if_one_of_them_raises_an_error(on_ranks, rank_pool, tmp_path: Path, strategy: str) -> None:
    told = on_ranks(2, fail, strategy, "alone", str(tmp_path))

    rank_pool.renew_world()
    saved = ["failed.ckpt", "last.ckpt", "own.ckpt"]
    assert told == [f"RankFailedError {saved}", f"KeyError {saved}"]
    for uninterrupted, *others in on_ranks(2, resumed_and_uninterrupted, strategy, str(tmp_path)):
        for resumed in others:
            torch.testing.assert_close(resumed, uninterrupted, rtol=1e-5, atol=1e-6)


def change_groups(port: int) -> list[bool]:
    dist.barrier()  # others may still be joining
    dist.destroy_process_group()  # the pool's
    os.environ["MASTER_PORT"] = str(port)

    def hybrid(minutes: int) -> dict[str, Tensor]:
        strategy = ParalFSDPStrategy(replicate=2, units=["Linear"], timeout=timedelta(minutes=minutes))
        return weights(fitted(strategy, 4, 1)[1])

    before = hybrid(3)
    first = dist.group.WORLD
    fitted(ParalDDPStrategy(timeout=timedelta(minutes=4)), 4, 1)
    second = dist.group.WORLD
    for ranks in ([0, 1], [2, 3]):  # different groups than in the first default group, with ranks of the mesh
        dist.new_group(ranks)
        if dist.get_rank() in ranks:
            dist.new_group(ranks, use_local_synchronization=True)
    after = hybrid(4)
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)
    return [first is not second, second is dist.group.WORLD, owned_group() is second]


def test_process_group_is_reused_by_the_next_run_or_replaced(on_ranks, rank_pool) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    rank_pool.renew_world()
    try:
        assert on_ranks(4, change_groups, port) == [[True, True, True]] * 4
    finally:
        rank_pool.renew_world()
