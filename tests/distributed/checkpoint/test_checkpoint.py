"""What is left out of checkpoints, precision, random numbers, background saves, and failures of one rank."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_paral import CheckpointOptions, ConfigurationError
from lightning_paral.checkpoint.load import load, verify
from lightning_paral.distributed.exchange import RankGroup
from tests.contract.cases import strategy_of
from tests.models.regression import Regression, regression_data
from tests.models.resumable import SAVED_AFTER, Losses, Resumable, SaveOnce, assert_continues, fit, losses, refusal
from tests.running import SaveAt, logged, quiet_trainer


def contents(path: str | Path) -> dict[str, Any]:
    return load(path, RankGroup())


# What is left out


class Frozen(Resumable):
    """Has the same frozen parameters in every run and random values otherwise; records the frozen ones at the start."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen.load_state_dict(Resumable().frozen.state_dict())

    def on_train_start(self) -> None:
        full = getattr(self.trainer.strategy, "full_parameter", torch.clone)
        self.found = {name: full(parameter).detach() for name, parameter in self.frozen.named_parameters()}


def resume_without_frozen(path: Path, label: str) -> tuple[Losses, list[str]]:
    """Return the losses and the warnings about frozen parameters."""
    torch.manual_seed(99)
    module = Frozen()
    built = {name: value.clone() for name, value in module.frozen.state_dict().items()}
    with logged("lightning.pytorch.utilities.rank_zero") as said:
        fit(label, dist.get_world_size(), resume_from=path, module=module)
    assert module.found.keys() == built.keys()
    assert all(torch.equal(value, built[name]) for name, value in module.found.items())
    return module.losses, [message for message in said if "frozen parameters" in message]


@pytest.mark.parametrize("label", ["paral_ddp", "paral_fsdp", "paral_zero2", "paral_zero3"])
def test_frozen_parameters_can_be_left_out(on_ranks, tmp_path: Path, label: str) -> None:
    path = tmp_path / "x.ckpt"
    whole = on_ranks(2, partial(losses, label, checkpoint={"save_frozen": False}, save_to=path))
    assert not [name for name in contents(path)["state_dict"] if name.startswith("frozen")]
    for strategy in ("paral_ddp", "paral_fsdp", "paral_zero3"):
        ranks = on_ranks(2, resume_without_frozen, path, strategy)
        assert_continues([found for found, _ in ranks], whole, about=strategy)
        ((message,), of_second) = (said for _, said in ranks)
        assert message.startswith("2 frozen parameters are not in the checkpoint, and keep the values")
        assert "frozen.bias, frozen.weight" in message
        assert of_second == []


def save_weights_only(folder: Path, label: str) -> None:
    callback = ModelCheckpoint(folder, filename="w", save_weights_only=True, every_n_train_steps=2)
    losses(label, callbacks=[callback], enable_checkpointing=True, num_batches=4)


@pytest.mark.parametrize("label", ["paral_ddp", "paral_fsdp", "paral_zero3"])
def test_weights_only(on_ranks, tmp_path: Path, label: str) -> None:
    on_ranks(2, save_weights_only, tmp_path, label)
    path = tmp_path / "w.ckpt"
    assert "optimizer_states" not in contents(path)
    assert "restore_optimizer=False" in refusal("paral_ddp", resume_from=path)
    losses("paral_ddp", checkpoint={"restore_optimizer": False}, resume_from=path)


def save_after_fit(path: str, label: str) -> None:
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=label, precision="bf16-true")
    trainer.fit(Regression(), regression_data(2, 2))
    with pytest.raises(ConfigurationError, match="master copies of the weights, which were freed"):
        trainer.save_checkpoint(path)


@pytest.mark.parametrize("label", ["paral_zero2", "paral_zero3"])
def test_master_weights_cannot_be_saved_after_the_fit(on_ranks, tmp_path: Path, label: str) -> None:
    on_ranks(2, save_after_fit, str(tmp_path / "all"), label)


# What is kept


@pytest.mark.parametrize(("source", "target"), [("zero3", "zero1"), ("zero2", "zero3"), ("zero1", "zero2")])
def test_master_weights_of_low_precision_are_kept(on_ranks, tmp_path: Path, source: str, target: str) -> None:
    path, options = tmp_path / "x.ckpt", {"precision": "bf16-true"}
    whole = on_ranks(2, partial(losses, f"paral_{source}", save_to=path, **options))
    saved = contents(path)["state_dict"]["first.weight"].clone()
    assert saved.dtype == torch.float32
    assert not torch.equal(saved, saved.bfloat16().float()), "the values are those of bf16 weights"
    resumed = on_ranks(2, partial(losses, f"paral_{target}", resume_from=path, **options))
    assert_continues(resumed, whole, tolerance=1e-2)


class Drawing(Regression):
    """Draws from all random generators in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, tuple[float, float, float]] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn[batch_idx] = torch.rand(1).item(), random.random(), float(np.random.rand())


def draw(path: str, label: str, form: Any, resume: bool) -> dict[int, tuple[float, float, float]]:
    """Return the drawn numbers."""
    module, data = Drawing(), regression_data(SAVED_AFTER + 3, 2)
    loader = DataLoader(data.dataset, data.batch_size, shuffle=True)
    strategy = strategy_of(label, checkpoint=CheckpointOptions(form))
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=strategy, callbacks=[] if resume else [SaveOnce(path)])
    seed = 99 if resume else dist.get_rank()
    for set_seed in (torch.manual_seed, random.seed, np.random.seed):
        set_seed(seed)
    trainer.fit(module, loader, ckpt_path=path if resume else None)
    return module.drawn


@pytest.mark.parametrize(("label", "form"), [("paral_ddp", "full"), ("paral_fsdp", "sharded")])
def test_random_numbers_continue_on_every_rank(on_ranks, tmp_path: Path, label: str, form: str) -> None:
    path = str(tmp_path / "x.ckpt")
    first, second = on_ranks(2, draw, path, label, form, False)
    assert not set(first[SAVED_AFTER]) & set(second[SAVED_AFTER])
    resumed = on_ranks(2, draw, path, label, form, True)
    for found, uninterrupted in zip(resumed, (first, second), strict=True):
        assert found == {step: uninterrupted[step] for step in range(SAVED_AFTER, SAVED_AFTER + 3)}


# In the background


def keep_last(folder: Path, label: str, **checkpoint: Any) -> None:
    options: dict[str, Any] = {"monitor": "step", "mode": "max", "every_n_train_steps": 1, "save_last": True}
    saves = ModelCheckpoint(folder, "{step}", save_top_k=2, **options)
    losses(label, checkpoint=checkpoint or None, callbacks=[saves], enable_checkpointing=True)


@pytest.mark.parametrize(
    ("label", "form"),
    [("paral_ddp", "full"), ("paral_ddp", "sharded"), ("paral_fsdp", "sharded"), ("paral_zero3", "full")],
)
def test_background_saves_hold_the_state_of_their_step(on_ranks, tmp_path: Path, label: str, form: str) -> None:
    on_ranks(2, partial(keep_last, tmp_path / "async", label, form=form, async_save=True))
    assert sorted(path.name for path in (tmp_path / "async").iterdir()) == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"]
    on_ranks(2, keep_last, tmp_path / "sync", "paral_ddp")
    for step in (4, 5):
        path = tmp_path / "async" / f"step={step}.ckpt"
        assert verify(path) == []
        expected, found = contents(tmp_path / "sync" / path.name), contents(path)
        assert found["global_step"] == step
        for name, value in expected["state_dict"].items():
            if not name.startswith("norm"):
                torch.testing.assert_close(found["state_dict"][name].clone(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [1, 5])  # the next save raises, or the end of the fit
def test_failure_of_a_background_save_raises_on_all_ranks(on_ranks, tmp_path: Path, step: int) -> None:
    (tmp_path / "file").write_text("no folder")
    callbacks = [SaveAt(step, f"{tmp_path}/file/x.ckpt")]
    for message in on_ranks(2, partial(refusal, "paral_ddp", checkpoint={"async_save": True}, callbacks=callbacks)):
        assert "failed on rank 0 of 2" in message


# Ranks


def save_unseen(path: Path) -> Losses:
    """Rank 1 is on a node that does not see the file, so rank 0 sends it the values."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Path, "exists", lambda self: False)
        return losses("paral_zero3", checkpoint="full", save_to=path)


def test_full_form_needs_no_shared_file_system(on_ranks, tmp_path: Path) -> None:
    whole = on_ranks(2, save_unseen, tmp_path / "x.ckpt")
    assert_continues([losses("paral_ddp", resume_from=tmp_path / "x.ckpt")], whole)
