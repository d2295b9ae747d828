"""AutoResume: the newest sound checkpoint, on all ranks, and the run goes on as if it had not ended."""

import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_paral import AutoResume, CheckpointError, ConfigurationError
from lightning_paral.checkpoint.load import find_candidates
from tests.contract.cases import strategy_of
from tests.models.witnessed import Witnessed, numbered_loader
from tests.running import logged, quiet_trainer

NUM_STEPS = 14  # two epochs of six steps, and two steps


class Fail(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("the run was interrupted")


def fail_to_read(*_: Any, **__: Any) -> None:
    raise OSError("the disk does not answer")


def train(
    folder: str,
    strategy: str | None = "ddp",
    fail_at: int | None = None,
    resume: bool = True,
    ckpt_path: str | None = None,
    every: int = 4,
    load_fails: bool = False,
) -> dict[str, Any]:
    """Fit with AutoResume, and return what was seen, the weights and the messages."""
    seed_everything(7, verbose=False)
    module = Witnessed(torch.float32 if strategy == "zero2" else torch.float64)  # ZeRO has no fp64
    callbacks: list[Any] = [AutoResume(folder)] if resume else []
    saving = {"every_n_train_steps": every, "save_top_k": -1, "save_last": "link"}
    callbacks += [ModelCheckpoint(folder, filename="{step}", **saving), *([Fail(fail_at)] if fail_at else [])]
    made = "auto" if strategy is None else strategy_of(f"paral_{strategy}", split="global")
    if load_fails:
        made.load_checkpoint = fail_to_read
    trainer = quiet_trainer(
        strategy=made,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=NUM_STEPS,
        enable_checkpointing=True,
        callbacks=callbacks,
    )
    error = ""
    with logged("lightning.pytorch.utilities.rank_zero") as texts, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, numbered_loader(), ckpt_path=ckpt_path)
        except (CheckpointError, RuntimeError, OSError) as raised:
            error = str(raised)
    texts += [str(each.message) for each in warned]
    return {
        "seen": module.seen,
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()} if not error else {},
        "messages": [text for text in texts if "AutoResume" in text],
        "error": error,
    }


def joined(ranks: list[dict[str, Any]]) -> dict[int, tuple[int, list[int]]]:
    """Return the epoch and the sorted numbers of the samples that all ranks together saw, by step."""
    steps: dict[int, tuple[int, list[int]]] = {}
    for rank in ranks:
        for epoch, step, numbers, _ in rank["seen"]:
            steps[step] = (epoch, sorted([*steps.get(step, (epoch, []))[1], *numbers]))
    return steps


def assert_same_run(
    ranks: list[dict[str, Any]], undisturbed: dict[str, Any], first_step: int, tolerance: float = 1e-9
) -> None:
    """Assert that the steps from `first_step`, and the final weights, equal those of the undisturbed run."""
    expected = {step: seen for step, seen in joined([undisturbed]).items() if step >= first_step}
    assert joined(ranks) == expected
    for rank in ranks:
        assert rank["error"] == ""
        for name, value in rank["weights"].items():
            expected_value = undisturbed["weights"][name]
            torch.testing.assert_close(value.double(), expected_value, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(str(tmp_path_factory.mktemp("undisturbed")), None, resume=False)


@pytest.fixture(scope="module")
def interrupted(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run on two ranks has left checkpoints of steps 4 and 8, before it failed in step 10."""
    folder = tmp_path_factory.mktemp("interrupted")
    ranks = rank_pool.run(2, train, str(folder), "ddp", 10)
    rank_pool.renew_world()
    assert all("the run was interrupted" in rank["error"] for rank in ranks)
    return folder


@pytest.fixture
def folder(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "checkpoints", ignore=shutil.ignore_patterns("last.ckpt")))


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_run_continues_as_if_it_had_not_ended(on_ranks, rank_pool, tmp_path, undisturbed, strategy: str) -> None:
    first = on_ranks(2, train, str(tmp_path), strategy, 10)
    rank_pool.renew_world()
    assert "starts from the beginning" in first[0]["messages"][0]

    ranks = on_ranks(2, train, str(tmp_path), strategy)

    assert_same_run(ranks, undisturbed, first_step=8, tolerance=1e-4 if strategy == "zero2" else 1e-9)


def test_run_that_was_resumed_at_the_end_of_an_epoch_can_be_resumed_again(tmp_path: Path, undisturbed) -> None:
    for fail_at in (7, 9):  # resumes after step 6, which ends the epoch, and then after step 8
        train(str(tmp_path), fail_at=fail_at, every=2)

    outcome = train(str(tmp_path), every=2)

    assert_same_run([outcome], undisturbed, first_step=8)


@pytest.mark.parametrize("world_size", [1, 4])
def test_run_continues_on_another_number_of_ranks_and_says_so(
    on_ranks, folder: Path, undisturbed, world_size: int
) -> None:
    ranks = on_ranks(world_size, train, str(folder))

    assert_same_run(ranks, undisturbed, first_step=8)
    (message,) = ranks[0]["messages"]
    assert f"resuming from {folder}/step=8.ckpt: step 8, saved " in message
    assert f"The number of ranks has changed from 2 to {world_size}." in message
    assert not any(rank["messages"] for rank in ranks[1:])


def damage(path: Path) -> None:
    """Change a byte in the middle of the data."""
    file = path if path.is_file() else max(path.iterdir(), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("spoil", [damage, truncate])
def test_damaged_checkpoint_is_named_and_the_one_before_is_taken(on_ranks, folder: Path, undisturbed, spoil) -> None:
    spoil(folder / "step=8.ckpt")

    ranks = on_ranks(2, train, str(folder))

    assert_same_run(ranks, undisturbed, first_step=4)
    text = "\n".join(ranks[0]["messages"])
    assert "step=8.ckpt is damaged" in text
    assert f"resuming from {folder}/step=4.ckpt instead" in text


def test_checkpoints_that_are_all_damaged_are_an_error(on_ranks, folder: Path) -> None:
    for path in folder.glob("*.ckpt"):
        damage(path)

    for rank in on_ranks(2, train, str(folder)):
        assert "none of the checkpoints in the folder can be loaded" in rank["error"]
        assert "step=4.ckpt is damaged" in rank["error"]
        assert rank["seen"] == []


def test_error_that_is_no_damage_is_raised_and_no_older_checkpoint_is_taken(on_ranks, folder: Path) -> None:
    for rank in on_ranks(2, partial(train, str(folder), load_fails=True)):
        assert "the disk does not answer" in rank["error"]
        assert rank["messages"] == []
        assert rank["seen"] == []


def test_sharded_checkpoint_with_a_missing_file_is_skipped(on_ranks, rank_pool, tmp_path, undisturbed) -> None:
    on_ranks(2, train, str(tmp_path), "fsdp", 10)
    rank_pool.renew_world()
    (tmp_path / "step=8.ckpt" / "__1_0.distcp").unlink()

    ranks = on_ranks(2, train, str(tmp_path), "fsdp")

    assert_same_run(ranks, undisturbed, first_step=4)
    assert "__1_0.distcp is missing" in "\n".join(ranks[0]["messages"])


def test_explicit_path_has_priority(folder: Path, undisturbed) -> None:
    outcome = train(str(folder), ckpt_path=str(folder / "step=4.ckpt"))

    assert_same_run([outcome], undisturbed, first_step=4)
    assert outcome["messages"] == []


def test_damaged_checkpoint_of_lightning_is_skipped_without_a_strategy_of_this_package(tmp_path: Path) -> None:
    train(str(tmp_path), None, fail_at=10)  # saves steps 4 and 8
    damage(tmp_path / "step=8.ckpt")

    outcome = train(str(tmp_path), None)

    assert f"{tmp_path}/step=8.ckpt" in "\n".join(outcome["messages"])
    assert min(step for _, step, _, _ in outcome["seen"]) == 4


def test_urls_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="folders, not URLs"):
        AutoResume("memory://bucket/checkpoints")


def test_candidates_are_listed_once_and_newest_first(folder: Path) -> None:
    (folder / "last.ckpt").symlink_to(folder / "step=8.ckpt")
    os.utime(folder / "step=4.ckpt")  # the newest by time
    (folder / "broken.ckpt").write_bytes(b"not a zip archive")
    (folder / "notes.txt").write_text("not a checkpoint")

    names = [Path(found.path).name for found in find_candidates(folder)]

    assert names == ["step=8.ckpt", "step=4.ckpt", "broken.ckpt"]
    assert find_candidates(folder / "missing") == []
