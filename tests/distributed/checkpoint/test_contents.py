"""User objects in checkpoints: states of modules, callbacks and optimizers of any kind, and hooks on one rank only."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor, nn

from lightning_paral import (
    CheckpointError,
    CheckpointOptions,
    ConfigurationError,
    ParalDPStrategy,
)
from lightning_paral.checkpoint.integrity import verify
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.agreement import RankGroup
from tests.contract.cases import strategy_of
from tests.models.resumable import SAVED_AFTER, Resumable, SaveOnce, fit, mean_losses
from tests.running import quiet_trainer

FORMS = ("full", "sharded")


def make(label: str, form: Any, **options: Any) -> Any:
    """Return the strategy of the case `paral_<label>`, with these checkpoint options."""
    return strategy_of(f"paral_{label}", checkpoint=CheckpointOptions(form, **options))


# Hooks that run on one rank only


class ChangedOnFirst(Resumable):
    """Changes weights on rank 0 only, which is an error, and adds another entry there, which is allowed."""

    change = ""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.is_global_zero:
            state = checkpoint["state_dict"]
            checkpoint["note"] = torch.arange(3)
            if self.change == "add":
                state["added"] = torch.ones(3)
            elif self.change == "cast":
                state["out.weight"] = state["out.weight"].double()
            elif self.change == "copy":
                state["out.weight"] = state["out.weight"].clone()


def save_changed(path: str, label: str, form: str, change: str) -> str:
    torch.manual_seed(3)
    module = ChangedOnFirst()
    module.change = change
    if not change:
        fit(make(label, form), 2, save_to=path, module=module)
        return ""
    with pytest.raises(CheckpointError) as raised:
        fit(make(label, form), 2, save_to=path, module=module)
    return str(raised.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("label", "change"), [("ddp", "add"), ("ddp", "copy"), ("fsdp", "cast"), ("zero3", "cast")])
def test_ranks_that_save_different_tensors_raise(on_ranks, tmp_path: Path, label: str, form: str, change: str) -> None:
    path = tmp_path / "x.ckpt"
    name = "state_dict.added" if change == "add" else "state_dict.out.weight"
    for message in on_ranks(2, save_changed, str(path), label, form, change):
        assert f"Ranks 0 and 1 do not save the same tensors: {name}." in message
    assert not path.exists()


@pytest.mark.parametrize("form", FORMS)
def test_rank_0_may_add_entries_other_than_weights(on_ranks, tmp_path: Path, form: str) -> None:
    on_ranks(2, save_changed, str(tmp_path / "x.ckpt"), "fsdp", form, "")
    assert load(tmp_path / "x.ckpt", RankGroup())["note"].tolist() == [0, 1, 2]


# Callbacks that keep shards


class Average(Callback):
    """Keeps an average of the weights, sharded like the weights."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.loaded: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *_: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.values.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values), "list": [self.values["scale"], 5], "numbers": (1, 2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["list"][1] == 5
        assert state_dict["numbers"] == (1, 2)
        assert torch.equal(state_dict["list"][0], state_dict["values"]["scale"])
        self.loaded = state_dict["values"]


def average(path: str, label: str, form: str, in_background: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    fit(make(label, form, async_save=in_background), 2, save_to=path, callbacks=[Average()], module=Resumable())
    loaded = Average()
    fit(make(label, form), 2, resume_from=path, callbacks=[loaded])
    return {name: value.clone() for name, value in loaded.loaded.items()}


@pytest.mark.parametrize(("form", "in_background"), [("full", False), ("sharded", False), ("sharded", True)])
def test_sharded_tensors_of_callbacks_are_saved_by_all_ranks(
    on_ranks, tmp_path: Path, form: str, in_background: bool
) -> None:
    expected = on_ranks(2, average, str(tmp_path / "full"), "ddp", "full", False)[0]
    for found in on_ranks(2, average, str(tmp_path / "sharded"), "fsdp", form, in_background):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    assert verify(tmp_path / "sharded") == []


class AverageInTuple(Average):
    def state_dict(self) -> dict[str, Any]:
        return {"values": (self.values["scale"], self.values["first.weight"])}


def save_in_tuple(path: str) -> None:
    with pytest.raises(CheckpointError, match="is in a tuple"):
        fit(make("fsdp", "sharded"), 2, save_to=path, callbacks=[AverageInTuple()])


def test_sharded_tensors_in_tuples_are_refused(on_ranks, tmp_path: Path) -> None:
    on_ranks(2, save_in_tuple, str(tmp_path / "x.ckpt"))


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
    fit(make("ddp", form), 1, save_to=tmp_path / "x.ckpt", module=with_states(STATES))
    module = with_states(
        {name: torch.zeros(9) for name in STATES}
    )  # a different size is allowed: the module restores it
    fit(make("ddp", form), 1, resume_from=tmp_path / "x.ckpt", module=module)
    for name, expected in STATES.items():
        found = module.keeping[name].state
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)


class Odd(nn.Module):
    """Has buffers of many dtypes and layouts, some of which are views."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(12)
        self.register_buffer("conjugate", torch.randn(3, 2, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch.randn(3, 2, dtype=torch.complex64).conj().imag)
        self.register_buffer("part", base[2:5])
        self.register_buffer("overlapping", base[4:8])
        self.register_buffer("strided", base[::3])
        self.register_buffer("expanded", torch.randn(1, 3).expand(4, 3))
        self.register_buffer("transposed", torch.randn(4, 3).t())
        self.register_buffer("channels_last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("eighth", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("unsigned", torch.arange(3).to(torch.uint16))
        self.register_buffer("float64", torch.randn(4, dtype=torch.float64))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_background", [False, True])
def test_tensors_of_all_kinds_are_restored(tmp_path: Path, form: Any, in_background: bool) -> None:
    module = Resumable()
    module.odd = Odd()
    expected = {name: value.clone() for name, value in module.odd.named_buffers(prefix="odd")}
    strategy = ParalDPStrategy(checkpoint=CheckpointOptions(form, async_save=in_background))
    fit(strategy, 1, save_to=tmp_path / "x.ckpt", module=module)
    found = load(tmp_path / "x.ckpt", RankGroup())["state_dict"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name].clone(), value, rtol=0, atol=0)


# Optimizers with empty state, and no optimizer


class Plain(Resumable):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Untrained(Resumable):
    def configure_optimizers(self) -> Any:
        return None


def save_and_resume(path: str, label: str, form: str, kind: Any) -> list[dict[int, float]]:
    found = []
    for keep in ("save_to", "resume_from"):
        torch.manual_seed(3)
        found.append(fit(make(label, form), 2, module=kind(), **{keep: path}).losses)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("label", "kind"), [("ddp", Plain), ("fsdp", Plain), ("ddp", Untrained)])
def test_optimizers_without_state_resume(on_ranks, tmp_path: Path, label: str, form: str, kind: Any) -> None:
    ranks = on_ranks(2, save_and_resume, str(tmp_path / "x.ckpt"), label, form, kind)
    expected, found = (mean_losses([rank[run] for rank in ranks]) for run in (0, 1))
    for number, loss in found.items():
        assert loss == pytest.approx(expected[number], rel=1e-5)
    assert verify(tmp_path / "x.ckpt") == []


class BeforeTheFirstStep(SaveOnce):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, *_: Any) -> None:
        """Override, because it would save a second time."""


def save_before(path: str, label: str) -> dict[int, float]:
    return fit(make(label, "sharded"), 2, callbacks=[BeforeTheFirstStep(path)]).losses


@pytest.mark.parametrize("label", ["fsdp", "zero2"])
def test_checkpoint_from_before_the_first_step_resumes(on_ranks, tmp_path: Path, label: str) -> None:
    expected = mean_losses(on_ranks(2, save_before, str(tmp_path / "x.ckpt"), label))
    found = fit("paral_ddp", 1, resume_from=tmp_path / "x.ckpt").losses
    assert len(found) == len(expected)
    for number, loss in found.items():
        assert loss == pytest.approx(expected[number], rel=1e-5)


# A user's CheckpointIO


@pytest.mark.parametrize("strategy", ["paral_fsdp", "paral_zero3"])
def test_checkpoint_io_is_refused_if_parameters_are_sharded(strategy: str) -> None:
    with pytest.raises(ConfigurationError, match=r"AsyncCheckpointIO saves the state of one rank.*async_save=True"):
        quiet_trainer(strategy=strategy, plugins=[AsyncCheckpointIO()], devices=1)


def test_checkpoint_io_is_used_if_parameters_are_replicated(tmp_path: Path) -> None:
    fit("paral_ddp", 1, save_to=tmp_path / "x.ckpt", plugins=[AsyncCheckpointIO()])
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["global_step"] == SAVED_AFTER // 2


def resume_with_average(path: str) -> list[dict[int, float]]:
    def run(**options: Any) -> dict[int, float]:
        losses: dict[int, float] = fit("paral_ddp", 2, callbacks=[EMAWeightAveraging(decay=0.5)], **options).losses
        return losses

    return [run(save_to=path), run(resume_from=path)]


def test_averages_of_weights_resume_under_ddp(on_ranks, tmp_path: Path) -> None:
    for expected, found in on_ranks(2, resume_with_average, str(tmp_path / "x.ckpt")):
        assert found == pytest.approx({number: expected[number] for number in found}, rel=1e-5)
