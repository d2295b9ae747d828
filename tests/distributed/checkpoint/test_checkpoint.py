"""Contents of checkpoints, changes by hooks, mismatches with the module, background saves, and saves behind URLs."""

import logging
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_paral import (
    CheckpointError,
    CheckpointOptions,
    ConfigurationError,
    ParalDDPStrategy,
    ParalFSDPStrategy,
    ParalZeROStrategy,
)
from lightning_paral.checkpoint.integrity import verify
from lightning_paral.checkpoint.io.storage import folder_at
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.agreement import RankGroup, all_ranks
from tests.models.regression import Regression, regression_data
from tests.models.resumable import NUM_BATCHES, SAVED_AFTER, Resumable, SaveOnce, fit, mean_losses
from tests.running import quiet_trainer


def make(label: str, **options: Any) -> Any:
    checkpoint = CheckpointOptions(**options)
    if label == "ddp":
        return ParalDDPStrategy(checkpoint=checkpoint)
    if label == "fsdp":
        return ParalFSDPStrategy(checkpoint=checkpoint)
    return ParalZeROStrategy(stage=int(label[-1]), checkpoint=checkpoint)  # type: ignore[arg-type]


def contents(path: str | Path) -> dict[str, Any]:
    return load(path, RankGroup())


# Hooks and options


class Edited(Resumable):
    """Changes the checkpoint when it is saved, and undoes that when it is loaded."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["renamed"] = state.pop("out.bias")
        state["added"] = torch.full((3,), 2.5)
        state["first.bias"] = state["first.bias"].to(torch.float64) * 2
        del state["frozen.bias"]
        checkpoint["mine"] = {"note": "kept", "values": torch.arange(4)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["out.bias"] = state.pop("renamed")
        state["first.bias"] = state["first.bias"] / 2
        state["frozen.bias"] = self.frozen_bias
        assert state.pop("added").sum() == 7.5
        assert checkpoint["mine"]["values"].tolist() == [0, 1, 2, 3]


def seeded(kind: Any) -> Any:
    torch.manual_seed(3)
    module = kind()
    module.frozen_bias = module.frozen.bias.detach().clone()
    return module


def save_edited(path: str, label: str, form: str) -> dict[int, float]:
    return fit(make(label, form=form), 2, save_to=path, module=seeded(Edited)).losses


def resume_edited(path: str, label: str) -> dict[int, float]:
    return fit(make(label), 2, resume_from=path, module=seeded(Edited)).losses


@pytest.mark.parametrize(
    ("label", "form"), [("ddp", "full"), ("fsdp", "sharded"), ("zero3", "full"), ("zero2", "sharded")]
)
def test_edits_of_hooks_are_saved_and_undone(on_ranks, tmp_path: Path, label: str, form: str) -> None:
    path = str(tmp_path / "x.ckpt")
    expected = mean_losses(on_ranks(2, save_edited, path, label, form))
    saved = contents(path)
    assert {"renamed", "added"} <= saved["state_dict"].keys()
    assert not {"out.bias", "frozen.bias"} & saved["state_dict"].keys()
    assert saved["state_dict"]["first.bias"].dtype == torch.float64
    assert saved["mine"]["note"] == "kept"
    found = mean_losses(on_ranks(2, resume_edited, path, label))
    for number, loss in found.items():
        assert loss == pytest.approx(expected[number], rel=1e-5)


class Gathering(Resumable):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["first.weight"].sum()


def save_gathering(path: str) -> None:
    with pytest.raises(CheckpointError, match="of which this rank holds only a shard"):
        fit("paral_zero3", 2, save_to=path, module=Gathering())


def test_sums_over_shards_are_refused_in_hooks(on_ranks, tmp_path: Path) -> None:
    on_ranks(2, save_gathering, str(tmp_path / "x.ckpt"))


def save_without_frozen(path: str, label: str) -> dict[int, float]:
    return fit(make(label, save_frozen=False), 2, save_to=path).losses


@pytest.mark.parametrize("label", ["ddp", "zero3"])
def test_frozen_parameters_can_be_left_out(on_ranks, tmp_path: Path, label: str) -> None:
    path = str(tmp_path / "x.ckpt")
    on_ranks(2, save_without_frozen, path, label)
    assert not [name for name in contents(path)["state_dict"] if name.startswith("frozen")]
    torch.manual_seed(3)
    module = Resumable()
    base = module.frozen.weight.detach().clone()
    fit("paral_ddp", 1, resume_from=path, module=module)
    assert torch.equal(module.frozen.weight, base)


class Frozen(Resumable):
    """Has the same frozen parameters in every run and random values otherwise; records the frozen ones at the start."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen.load_state_dict(Resumable().frozen.state_dict())

    def on_train_start(self) -> None:
        full = getattr(self.trainer.strategy, "full_parameter", torch.clone)
        self.found = {name: full(parameter).detach() for name, parameter in self.frozen.named_parameters()}


def resume_without_frozen(path: str, strategy: str) -> tuple[dict[int, float], list[str]]:
    """Return the losses and the warnings about frozen parameters."""
    torch.manual_seed(99)
    module = Frozen()
    built = {name: value.clone() for name, value in module.frozen.state_dict().items()}
    logger, said = logging.getLogger("lightning.pytorch.utilities.rank_zero"), []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        fit(strategy, 2, resume_from=path, module=module)
    finally:
        logger.removeHandler(handler)
    assert module.found.keys() == built.keys()
    assert all(torch.equal(value, built[name]) for name, value in module.found.items())
    return module.losses, [message for message in said if "frozen parameters" in message]


@pytest.mark.parametrize("label", ["fsdp", "zero2"])
def test_checkpoint_without_frozen_parameters_resumes(on_ranks, tmp_path: Path, label: str) -> None:
    path = str(tmp_path / "x.ckpt")
    expected = mean_losses(on_ranks(2, save_without_frozen, path, label))
    for strategy in ("paral_ddp", "paral_fsdp", "paral_zero3"):
        ranks = on_ranks(2, resume_without_frozen, path, strategy)
        found = mean_losses([losses for losses, _ in ranks])
        assert list(found) == list(range(SAVED_AFTER, NUM_BATCHES))
        for number, loss in found.items():
            assert loss == pytest.approx(expected[number], rel=1e-5), f"{strategy}, batch {number}"
        ((message,), of_second) = (said for _, said in ranks)
        assert message.startswith("2 frozen parameters are not in the checkpoint, and keep the values")
        assert "frozen.bias, frozen.weight" in message
        assert of_second == []


def save_weights_only(folder: str, label: str) -> None:
    callback = ModelCheckpoint(folder, filename="w", save_weights_only=True, every_n_train_steps=2)
    fit(make(label), 2, callbacks=[callback], enable_checkpointing=True, num_batches=4)


@pytest.mark.parametrize("label", ["ddp", "fsdp", "zero3"])
def test_weights_only(on_ranks, tmp_path: Path, label: str) -> None:
    on_ranks(2, save_weights_only, str(tmp_path), label)
    path = tmp_path / "w.ckpt"
    assert "optimizer_states" not in contents(path)
    with pytest.raises(CheckpointError, match="restore_optimizer=False"):
        fit("paral_ddp", 1, resume_from=path)
    fit(make("ddp", restore_optimizer=False), 1, resume_from=path)


def save_after_fit(folder: str, label: str) -> Any:
    module = Regression()
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=make(label))
    trainer.fit(module, regression_data(2, 2))
    trainer.save_checkpoint(f"{folder}/weights", weights_only=True)
    if label.startswith("zero"):
        low = quiet_trainer(max_epochs=1, devices=2, strategy=make(label), precision="bf16-true")
        low.fit(Regression(), regression_data(2, 2))
        with pytest.raises(ConfigurationError, match="master copies of the weights, which were freed"):
            low.save_checkpoint(f"{folder}/all")
    dist.barrier()
    return module.out.weight.detach().clone()


@pytest.mark.parametrize("label", ["ddp", "fsdp", "zero2", "zero3"])
def test_weights_can_be_saved_after_the_fit(on_ranks, tmp_path: Path, label: str) -> None:
    expected = on_ranks(2, save_after_fit, str(tmp_path), label)[0]
    torch.testing.assert_close(contents(tmp_path / "weights")["state_dict"]["out.weight"].clone(), expected)


def fit_in_bf16(path: str, label: str, resume: bool) -> dict[int, float]:
    keep = {"resume_from": path} if resume else {"save_to": path}
    return fit(make(label), 2, precision="bf16-true", **keep).losses  # type: ignore[arg-type]


@pytest.mark.parametrize(("source", "target"), [("zero3", "zero1"), ("zero2", "zero3"), ("zero1", "zero2")])
def test_master_weights_of_low_precision_are_kept(on_ranks, tmp_path: Path, source: str, target: str) -> None:
    path = str(tmp_path / "x.ckpt")
    expected = mean_losses(on_ranks(2, fit_in_bf16, path, source, False))
    saved = contents(path)["state_dict"]["first.weight"].clone()
    assert saved.dtype == torch.float32
    assert not torch.equal(saved, saved.bfloat16().float()), "the values are those of bf16 weights"
    for number, loss in mean_losses(on_ranks(2, fit_in_bf16, path, target, True)).items():
        assert loss == pytest.approx(expected[number], rel=1e-2)


class Drawing(Regression):
    """Draws from all random generators in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, tuple[float, float, float]] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn[batch_idx] = torch.rand(1).item(), random.random(), float(np.random.rand())


def draw(path: str, label: str, form: str, spread: bool, resume: bool) -> dict[int, tuple[float, float, float]]:
    """Return the drawn numbers. With `spread`, the strategy distributes the samples, otherwise the user's sampler."""
    module, loader = Drawing(), regression_data(SAVED_AFTER + 3, 2)
    if spread:
        loader = DataLoader(loader.dataset, loader.batch_size, shuffle=True)
    callbacks = [] if resume else [SaveOnce(path)]
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=make(label, form=form), callbacks=callbacks)
    seed = 99 if resume else dist.get_rank()
    for set_seed in (torch.manual_seed, random.seed, np.random.seed):
        set_seed(seed)
    trainer.fit(module, loader, ckpt_path=path if resume else None)
    return module.drawn


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("label", "form"), [("ddp", "full"), ("fsdp", "sharded")])
def test_random_numbers_continue_on_every_rank(on_ranks, tmp_path: Path, label: str, form: str, spread: bool) -> None:
    path = str(tmp_path / "x.ckpt")
    first, second = on_ranks(2, draw, path, label, form, spread, False)
    assert not set(first[SAVED_AFTER]) & set(second[SAVED_AFTER])
    resumed = on_ranks(2, draw, path, label, form, spread, True)
    for found, uninterrupted in zip(resumed, (first, second), strict=True):
        assert found == {step: uninterrupted[step] for step in range(SAVED_AFTER, SAVED_AFTER + 3)}


# Mismatches


class Other(Resumable):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 9)
        self.extra = nn.Linear(2, 2)
        del self.out


class Regrouped(Resumable):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad and p.dim() > 1])


def refusals(path: str, label: str) -> list[str]:
    messages = []
    for module in (Other(), Regrouped()):
        with pytest.raises(CheckpointError) as raised:
            fit(make(label), 2, resume_from=path, module=module)
        messages.append(str(raised.value))
        dist.barrier()
    return messages


def save_under_ddp(path: str) -> None:
    fit("paral_ddp", 2, save_to=path)


@pytest.mark.parametrize("label", ["ddp", "fsdp", "zero2"])
def test_mismatches_are_listed_by_name(on_ranks, tmp_path: Path, label: str) -> None:
    path = str(tmp_path / "x.ckpt")
    on_ranks(2, save_under_ddp, path)
    for weights, optimizer in on_ranks(2, refusals, path, label):
        assert "Missing in the checkpoint: extra.bias, extra.weight." in weights
        assert "Only in the checkpoint: out.bias, out.weight." in weights
        assert "first.weight (checkpoint (7, 5), module (9, 5))" in weights
        assert "Only in the checkpoint: first.bias, out.bias, scale, second.bias, tied.bias." in optimizer


class Grown(Resumable):
    def __init__(self) -> None:
        super().__init__()
        self.grown = nn.Parameter(torch.ones(2), requires_grad=False)
        self.strict_loading = False


def test_loading_without_strict_takes_matching_entries(on_ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "x.ckpt")
    on_ranks(2, save_under_ddp, path)
    assert fit("paral_ddp", 1, resume_from=path, module=Grown()).grown.tolist() == [1.0, 1.0]


# In the background


def keep_top(folder: str, label: str, form: str) -> list[str]:
    callback = ModelCheckpoint(
        folder, filename="{step}", monitor="step", mode="max", save_top_k=2, save_last=True, every_n_train_steps=1
    )
    fit(make(label, form=form, async_save=True), 2, callbacks=[callback], enable_checkpointing=True)
    dist.barrier()
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("label", "form"), [("ddp", "full"), ("ddp", "sharded"), ("fsdp", "sharded"), ("zero3", "full")]
)
def test_background_saves_hold_the_state_of_their_step(on_ranks, tmp_path: Path, label: str, form: str) -> None:
    names = on_ranks(2, keep_top, str(tmp_path / "async"), label, form)[0]
    assert names == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"]
    on_ranks(2, save_under_ddp_at_end, str(tmp_path / "sync"))
    for step in (4, 5):
        path = tmp_path / "async" / f"step={step}.ckpt"
        assert verify(path) == []
        expected = contents(tmp_path / "sync" / f"step={step}.ckpt")
        found = contents(path)
        assert found["global_step"] == step
        for name, value in expected["state_dict"].items():
            if "running" not in name and "num_batches" not in name:
                torch.testing.assert_close(found["state_dict"][name].clone(), value, rtol=1e-5, atol=1e-6)


def save_under_ddp_at_end(folder: str) -> None:
    callback = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    fit("paral_ddp", 2, callbacks=[callback], enable_checkpointing=True)


def save_into_nothing(folder: str, again: bool) -> str:
    class Twice(SaveOnce):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:  # type: ignore[no-untyped-def]
            if batch_idx == 1 or (again and batch_idx == 3):
                trainer.save_checkpoint(self.path)

    with pytest.raises(CheckpointError) as raised:
        fit(make("ddp", async_save=True), 2, callbacks=[Twice(f"{folder}/file/x.ckpt")])
    return str(raised.value)


@pytest.mark.parametrize("again", [False, True])
def test_failure_of_a_background_save_raises_on_all_ranks(on_ranks, tmp_path: Path, again: bool) -> None:
    (tmp_path / "file").write_text("no folder")
    for message in on_ranks(2, save_into_nothing, str(tmp_path), again):
        assert "failed on rank 0 of 2" in message


# Behind URLs


class SharedFileSystem(LocalFileSystem):
    """A file system for tests, shared by all processes as `shared://`, that behaves like `s3fs`.

    It remembers what it found until it is told not to, and takes a version in the second place of `cat_file`.
    """

    protocol = "shared"
    found: ClassVar[dict[str, Any]] = {}
    requests: ClassVar[list[tuple[int, int]]] = []

    def info(self, path: Any, **kwargs: Any) -> Any:
        if path not in self.found:
            self.found[path] = super().info(path, **kwargs)
        return self.found[path]

    def invalidate_cache(self, path: Any = None) -> None:
        self.found.clear()

    def cat_file(self, path: Any, version_id: Any = None, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        assert version_id is None
        self.requests.append((start, end))
        return super().cat_file(path, start=start, end=end, **kwargs)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("shared://"))


def fit_behind_url(url: str, form: str, resume: bool) -> dict[int, float]:
    fsspec.register_implementation("shared", SharedFileSystem, clobber=True)
    keep = {"resume_from": url} if resume else {"save_to": url}
    losses = fit(make("fsdp", form=form), 2, **keep).losses  # type: ignore[arg-type]
    if not resume:
        fit(make("fsdp", form=form), 2, save_to=url)  # in its place
    return losses


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_ranks_save_and_resume_behind_a_url(on_ranks, tmp_path: Path, form: str) -> None:
    url = f"shared://{tmp_path}/x.ckpt"
    expected = mean_losses(on_ranks(2, fit_behind_url, url, form, False))
    for number, loss in mean_losses(on_ranks(2, fit_behind_url, url, form, True)).items():
        assert loss == pytest.approx(expected[number], rel=1e-5)
    if form == "sharded":
        assert len(list((tmp_path / "x.ckpt").glob("*.distcp"))) == 2
    assert verify(tmp_path / "x.ckpt") == []


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_memory_file_system(form: str) -> None:
    url = f"memory://checkpoints/{form}.ckpt"
    callback = ModelCheckpoint("memory://checkpoints", filename=form, every_n_train_steps=5)
    fit(make("ddp", form=form), 1, callbacks=[callback], enable_checkpointing=True, accumulate_grad_batches=1)
    assert verify(url) == []
    assert contents(url)["global_step"] == 10
    with pytest.raises(CheckpointError, match="There is no checkpoint at memory://"):
        contents("memory://checkpoints/none")


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_background_save_behind_a_url_resumes(form: str) -> None:
    url = f"memory://background/{form}.ckpt"
    expected = fit(make("ddp", form=form, async_save=True), 1, save_to=url).losses
    assert verify(url) == []
    found = fit("paral_ddp", 1, resume_from=url).losses
    assert found == pytest.approx({number: expected[number] for number in range(SAVED_AFTER, NUM_BATCHES)}, rel=1e-5)


def test_full_and_sharded_checkpoints_replace_each_other_behind_a_url() -> None:
    url = "memory://forms/x.ckpt"
    fit(make("ddp", form="sharded"), 1, save_to=url)
    fit(make("ddp", form="full"), 1, save_to=url)
    assert verify(url) == []
    assert fsspec.filesystem("memory").isfile("/forms/x.ckpt")
    assert len(fsspec.filesystem("memory").ls("/forms")) == 1
    with pytest.raises(CheckpointError, match=r"memory://forms/x\.ckpt is a file, so a folder"):
        fit(make("ddp", form="sharded"), 1, save_to=url)
    assert verify(url) == []


def test_damage_behind_a_url_is_named_by_the_url() -> None:
    url = "memory://damage/x.ckpt"
    fit(make("ddp", form="full"), 1, save_to=url)
    memory = fsspec.filesystem("memory")
    memory.pipe("/damage/x.ckpt", memory.cat("/damage/x.ckpt")[:-10])
    assert url in verify(url)[0]
    with pytest.raises(CheckpointError, match=url) as raised:
        load(url, RankGroup())
    assert "lightning_paral_" not in str(raised.value)


def test_files_written_by_other_processes_behind_a_url_are_seen(tmp_path: Path) -> None:
    fsspec.register_implementation("shared", SharedFileSystem, clobber=True)
    for nbytes in (2, 3):
        (tmp_path / "x").write_bytes(bytes(nbytes))
        assert folder_at(f"shared://{tmp_path}").size("x") == nbytes


def test_small_reads_behind_a_url_take_one_request(tmp_path: Path) -> None:
    fsspec.register_implementation("shared", SharedFileSystem, clobber=True)
    data = random.Random(1).randbytes(1000)
    (tmp_path / "x").write_bytes(data)
    folder = folder_at(f"shared://{tmp_path}")
    SharedFileSystem.requests.clear()
    for offset in (100, 110, 500, 990):
        assert folder.read("x", offset, 10) == data[offset : offset + 10]
    assert len(SharedFileSystem.requests) == 1
    assert folder.read("x", 0, 10) == data[:10]
    assert len(SharedFileSystem.requests) == 2


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_missing_file_system_is_named_with_its_extra() -> None:
    (fault,) = verify("s3://bucket/x.ckpt")
    assert "pip install 'lightning_paral[s3]'" in fault


# Ranks


def fail_on_one(rank: int) -> str:
    ranks = all_ranks()

    def act() -> int:
        if ranks.rank == rank:
            raise OSError("the disk")
        return ranks.rank

    with pytest.raises(CheckpointError) as raised:
        ranks.gather_results("Trying", act)
    return str(raised.value)


def test_failure_of_one_rank_raises_on_all(on_ranks) -> None:
    assert set(on_ranks(2, fail_on_one, 1)) == {"Trying failed on rank 1 of 2: OSError: the disk"}


def save_unseen(path: str) -> dict[int, float]:
    """Rank 1 is on a node that does not see the file, so rank 0 sends it the values."""
    hidden = Path.exists
    if dist.get_rank() == 1:
        Path.exists = lambda self: False  # type: ignore[method-assign]
    try:
        return fit(ParalZeROStrategy(stage=3, checkpoint="full"), 2, save_to=path).losses
    finally:
        Path.exists = hidden  # type: ignore[method-assign]


def test_full_form_needs_no_shared_file_system(on_ranks, tmp_path: Path) -> None:
    expected = mean_losses(on_ranks(2, save_unseen, str(tmp_path / "x.ckpt")))
    found = fit("paral_ddp", 1, resume_from=tmp_path / "x.ckpt").losses
    for number, loss in found.items():
        assert loss == pytest.approx(expected[number], rel=1e-5)
