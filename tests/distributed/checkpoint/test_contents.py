"""User objects in checkpoints: states of modules and callbacks of any kind, and hooks on one rank only."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_paral import CheckpointError
from lightning_paral.checkpoint.lazy_tensor import materialize
from lightning_paral.checkpoint.load import load, verify
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.checkpoint.shards import FlatShard, identity
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.distributed.exchange import RankGroup, all_ranks
from tests.contract.cases import MAIN, labels, with_ranks
from tests.models.resumable import NUM_BATCHES, Resumable, SaveOnce, losses, refusal

FORMS = ("full", "sharded")


# Hooks that run on one rank only


class ChangedOnFirst(Resumable):
    """Adds entries on rank 0 only, which is allowed, and changes a weight there, which is an error if it is sharded."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.is_global_zero:
            state = checkpoint["state_dict"]
            checkpoint["note"] = torch.arange(3)
            if self.change == "add":
                state["added"] = torch.ones(3)
            elif self.change == "cast":
                state["out.weight"] = state["out.weight"].double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", ["fsdp", "zero3"])
def test_ranks_that_save_different_shards_raise(on_ranks, tmp_path: Path, label: str, form: str) -> None:
    path, make = tmp_path / "x.ckpt", partial(ChangedOnFirst, "cast")
    for message in on_ranks(2, partial(refusal, f"paral_{label}", make, checkpoint=form, save_to=path)):
        assert "state_dict.out.weight on different ranks do not fit together" in message
        assert "same changes on all ranks" in message
    assert not path.exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", ["ddp", "fsdp"])
def test_rank_0_may_add_entries(on_ranks, tmp_path: Path, label: str, form: str) -> None:
    path = tmp_path / "x.ckpt"
    on_ranks(2, partial(losses, f"paral_{label}", partial(ChangedOnFirst, "add"), checkpoint=form, save_to=path))
    saved = load(path, RankGroup())
    assert saved["note"].tolist() == [0, 1, 2]
    assert torch.equal(saved["state_dict"]["added"], torch.ones(3))


# Callbacks that keep shards


class Keeps(Callback):
    """Keeps weights in its state, sharded like the weights."""

    def __init__(self, state: Callable[[nn.Module], Any]) -> None:
        self.state = state

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        self.module = pl_module

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.state(self.module)}


def in_places(module: nn.Module) -> Any:
    return {
        "all": {name: p.detach().clone() for name, p in module.named_parameters()},
        "list": [module.scale.detach(), 5],
        "numbers": (1, 2),
    }


def in_tuple(module: nn.Module) -> Any:
    return tuple(parameter.detach() for parameter in module.parameters())


@pytest.mark.parametrize(("form", "in_background"), [("full", False), ("sharded", False), ("sharded", True)])
def test_sharded_tensors_of_callbacks_are_saved_by_all_ranks(
    on_ranks, tmp_path: Path, form: str, in_background: bool
) -> None:
    path, checkpoint = tmp_path / "x.ckpt", {"form": form, "async_save": in_background}
    options: dict[str, Any] = {"save_to": path, "callbacks": [Keeps(in_places)]}
    on_ranks(2, partial(losses, "paral_fsdp", checkpoint=checkpoint, **options))
    saved = load(path, RankGroup())
    (state,) = (state["kept"] for state in saved["callbacks"].values() if "kept" in state)
    for name, value in state["all"].items():
        assert torch.equal(value.clone(), saved["state_dict"][name].clone()), name
    assert torch.equal(state["list"][0].clone(), saved["state_dict"]["scale"].clone())
    assert (state["list"][1], state["numbers"]) == (5, (1, 2))
    assert verify(path) == []


def test_sharded_tensors_in_tuples_are_refused(on_ranks, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_to": tmp_path / "x.ckpt", "callbacks": [Keeps(in_tuple)]}
    for message in on_ranks(2, partial(refusal, "paral_fsdp", **options)):
        assert "is in a tuple" in message


# States of modules beside their tensors


class Keeping(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


STATES: dict[str, Any] = {
    "tensor": torch.arange(5),
    "tuple": (torch.arange(3), 1),
    "list": [torch.arange(3), 1, None, [torch.ones(2)]],
    "dict": {"x": torch.arange(3), "empty": {}, 3: torch.zeros(1), None: "none", "pair": (1, torch.ones(1))},
    "ordered": OrderedDict(a=torch.ones(2)),
    "empty": {},
    "none": None,
}


def with_states(states: dict[str, Any]) -> Resumable:
    module = Resumable()
    module.keeping = nn.ModuleDict({name: Keeping(state) for name, state in states.items()})
    return module


@pytest.mark.parametrize("form", FORMS)
def test_extra_states_of_modules_are_restored(tmp_path: Path, form: str) -> None:
    losses("paral_ddp", lambda: with_states(STATES), checkpoint=form, save_to=tmp_path / "x.ckpt")
    module = with_states({name: torch.zeros(9) for name in STATES})  # of another size: the module restores it
    losses("paral_ddp", lambda: module, resume_from=tmp_path / "x.ckpt")
    for name, expected in STATES.items():
        found = module.keeping[name].state
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)


class Counts(Resumable):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = Counter(a=1, b=2)


@pytest.mark.parametrize("form", FORMS)
def test_counts_are_saved_as_they_are(tmp_path: Path, form: str) -> None:
    losses("paral_ddp", Counts, checkpoint=form, save_to=tmp_path / "x.ckpt")
    assert load(tmp_path / "x.ckpt", RankGroup())["counted"] == Counter(a=1, b=2)


def views() -> dict[str, Tensor]:
    """Return views of one tensor, with the same address, dtype and shape."""
    numbers = torch.randn(3, 3, dtype=torch.complex64)
    return {
        "numbers": numbers,
        "conjugated": numbers.conj(),
        "transposed": numbers.t(),
        "imaginary": numbers.imag,
        "negated": numbers.conj().imag,
    }


def odd() -> dict[str, Tensor]:
    """Return tensors of many dtypes and layouts."""
    base = torch.randn(12)
    return (
        views()
        | {
            "part": base[2:5],
            "one": base.view(3, 4)[:1, 0],  # contiguous, though its stride is 4
            "overlapping": base[4:8],
            "strided": base[::3],
            "expanded": torch.randn(1, 3).expand(4, 3),
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "empty": torch.empty(0, 3),
            "flags": torch.tensor([True, False]),
            "eighth": torch.randn(4).to(torch.float8_e4m3fn),
            "unsigned": torch.arange(3).to(torch.uint16),
            "float64": torch.randn(4, dtype=torch.float64),
        }
    )


def with_buffers(make: Any) -> Resumable:
    module = Resumable()
    for name, value in make().items():
        module.register_buffer(name, value)
    return module


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(("label", "make"), [("paral_dp", odd), ("paral_ddp", views), ("paral_fsdp", views)])
def test_tensors_of_all_kinds_are_restored(
    tmp_path: Path, label: str, make: Any, form: str, in_background: bool
) -> None:
    path, module, resumed = tmp_path / "x.ckpt", with_buffers(make), with_buffers(make)
    expected = {name: value.clone() for name, value in module.named_buffers() if "norm" not in name}
    losses(label, lambda: module, checkpoint={"form": form, "async_save": in_background}, save_to=path)
    found = load(path, RankGroup())["state_dict"]
    if make is views:  # torch cannot write into an expanded tensor
        losses(label, lambda: resumed, resume_from=path)
        found = dict(resumed.named_buffers())
    for name, value in expected.items():
        torch.testing.assert_close(found[name].clone(), value, rtol=0, atol=0)


# Before the first step


class BeforeTheFirstStep(SaveOnce):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, *_: Any) -> None:
        """Override, because it would save a second time."""


@pytest.mark.parametrize("label", ["paral_fsdp", "paral_zero2"])
def test_checkpoint_from_before_the_first_step_resumes(on_ranks, tmp_path: Path, label: str) -> None:
    path = tmp_path / "x.ckpt"
    callbacks = [BeforeTheFirstStep(str(path))]
    whole = on_ranks(2, partial(losses, label, checkpoint="sharded", callbacks=callbacks))
    found = losses("paral_ddp", resume_from=path)
    assert found == pytest.approx({number: sum(each[number] for each in whole) / 2 for number in range(NUM_BATCHES)})


# Before the first step of a resumed run


class SaveFirst(SaveOnce):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not Path(self.path).exists():
            trainer.save_checkpoint(self.path)


def save_and_save_again(label: str, first: Path, second: Path) -> None:
    losses(label, save_to=first)
    # With two batches per optimizer step, the first batch ends without a step.
    losses(label, resume_from=first, callbacks=[SaveFirst(str(second))])


def optimizer_state(path: Path) -> Any:
    state = load(path, RankGroup())["optimizer_states"][0]["state"]
    return tree_map_only(torch.Tensor, materialize, state)


@pytest.mark.parametrize("strategy", labels(with_ranks(MAIN, 2)))
def test_optimizer_states_are_saved_again_before_the_first_step(on_ranks, tmp_path: Path, strategy: str) -> None:
    paths = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    on_ranks(2, save_and_save_again, strategy, *paths)

    first, second = map(optimizer_state, paths)
    assert first
    torch.testing.assert_close(second, first, rtol=0.0, atol=0.0)


# Callbacks that keep shards on a later stage of a pipeline


def save_of_second_stage(path: Path, form: str, key: str | int) -> str:
    """Save a shard that a callback keeps on rank 1 only, under `key`. Return the error."""
    ranks = all_ranks()
    checkpoint: dict[str, Any] = {"state_dict": {f"layer{ranks.rank}": torch.full((2,), float(ranks.rank))}}
    if ranks.rank == 1:
        values = torch.arange(6.0)
        checkpoint["callbacks"] = {"keeps": {key: FlatShard((2, 3), torch.float32, 0, 6, partial(identity, values))}}
    try:
        SaveJob.prepare(checkpoint, path, form, ranks, strategy="Test", stages=[0, 1]).write(ranks)  # type: ignore[arg-type]
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("form", FORMS)
def test_shard_of_a_later_stage_is_saved_by_name_only(on_ranks, tmp_path: Path, form: str) -> None:
    assert on_ranks(2, save_of_second_stage, tmp_path / "x.ckpt", form, "average") == ["", ""]
    saved = load(tmp_path / "x.ckpt", RankGroup())
    assert torch.equal(saved["callbacks"]["keeps"]["average"], torch.arange(6.0).view(2, 3))
    assert [float(saved["state_dict"][f"layer{rank}"].sum()) for rank in (0, 1)] == [0.0, 2.0]

    refused = on_ranks(2, save_of_second_stage, tmp_path / "y.ckpt", form, 0)
    assert all("callbacks.keeps.0 is a shard that only a later stage" in message for message in refused)
    assert not (tmp_path / "y.ckpt").exists()
