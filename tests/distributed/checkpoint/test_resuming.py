"""Modules that save and load in their own way resume as if training had not stopped."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_paral import CheckpointError
from lightning_paral.checkpoint.load import peek, verify
from tests.contract.cases import PER_PLACEMENT, labels, with_ranks
from tests.models.resumable import NUM_BATCHES, Resumable, SaveOnce, assert_continues, losses, refusal
from tests.running import quiet_trainer

PLACEMENTS = labels(with_ranks(PER_PLACEMENT, 2))
FORMS = ("full", "sharded")


def rename(state: dict[str, Any], old: str, new: str, factor: float) -> None:
    for kind in ("weight", "bias"):
        if f"{old}.{kind}" in state:
            state[f"{new}.{kind}"] = state.pop(f"{old}.{kind}") * factor


class OldVersion(Resumable):
    saved = ("input.weight",)
    not_saved = ("first",)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        rename(checkpoint["state_dict"], "first", "input", 2.0)


class LoadsOldVersion(Resumable):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(
            lambda _, state, prefix, *__: rename(state, f"{prefix}input", f"{prefix}first", 0.5)
        )


class Lookahead(torch.optim.AdamW):
    """Lookahead (arXiv:1907.08610): pulls weights towards slow weights, which it saves outside `state`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        fast = [p for group in self.param_groups for p in group["params"]]
        for mine, parameter in zip(self.slow, fast, strict=True):
            parameter.copy_(mine.lerp_(parameter, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": dict(enumerate(self.slow))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow = list(state_dict["slow"].values())
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Counting(torch.optim.Optimizer):
    """Counts steps in its groups, to which it adds the count, and has a state of integers."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in [each for each in group["params"] if each.grad is not None]:
                state = self.state[parameter]
                if not state:
                    state["codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state["codes"].add_(1)
                parameter.sub_(parameter.grad * state["codes"], alpha=group["lr"] / group["count"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert all(state["codes"].dtype == torch.uint8 for state in state_dict["state"].values())
        super().load_state_dict(state_dict)  # which converts states to the dtype of parameters
        for state in self.state.values():
            state["codes"] = state["codes"].to(torch.uint8)


class OtherOptimizer(Resumable):
    def __init__(self, make_optimizer: Any, **options: Any) -> None:
        super().__init__()
        self.make_optimizer = partial(make_optimizer, **options)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


class ScalarGroup(Resumable):
    """Has a group of a parameter without dimensions, of which NAdam's `mu_product` has the shape."""

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad and p is not self.scale]
        return torch.optim.NAdam([{"params": trained}, {"params": [self.scale]}], lr=1e-2)


class Untrained(Resumable):
    def configure_optimizers(self) -> Any:
        return None


WithLookahead = partial(OtherOptimizer, Lookahead, lr=1e-2)
WithLBFGS = partial(OtherOptimizer, torch.optim.LBFGS, lr=0.1, max_iter=2, history_size=3)
WithCounts = partial(OtherOptimizer, Counting, lr=1e-2)
WithoutState = partial(OtherOptimizer, torch.optim.SGD, lr=1e-2)
CASES: list[tuple[Any, Any, str, str | None, int]] = [
    *((OldVersion, LoadsOldVersion, label, None, 2) for label in PLACEMENTS),
    *((each, each, "paral_ddp", form, 1) for each in (WithLookahead, WithLBFGS) for form in FORMS),
    *((WithoutState, WithoutState, label, form, 2) for label in ("paral_ddp", "paral_fsdp") for form in FORMS),
    *((WithCounts, WithCounts, label, "sharded", 2) for label in ("paral_ddp", "paral_fsdp")),
    (ScalarGroup, ScalarGroup, "paral_zero2", "sharded", 2),
    *((Untrained, Untrained, "paral_ddp", form, 2) for form in FORMS),
]


@pytest.mark.parametrize(("saving", "loading", "label", "form", "num_ranks"), CASES)
def test_module_resumes(
    on_ranks, tmp_path: Path, saving: Any, loading: Any, label: str, form: str | None, num_ranks: int
) -> None:
    path = tmp_path / "x.ckpt"
    whole = on_ranks(num_ranks, partial(losses, label, saving, checkpoint=form, save_to=path))
    assert verify(path) == []
    names = peek(path)[1]["state_dict"].keys()
    assert set(getattr(saving, "saved", ())) <= names
    assert not [name for name in names if name.startswith(getattr(saving, "not_saved", ()))]

    assert_continues(on_ranks(num_ranks, partial(losses, label, loading, checkpoint=form, resume_from=path)), whole)


class ReadsValues(Resumable):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {
            name: value.sum(0, keepdim=True) if value.dim() else value for name, value in super().state_dict().items()
        }


class ReadsInHook(Resumable):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["first.weight"].sum()


@pytest.mark.parametrize("make", [ReadsValues, ReadsInHook])
def test_reading_values_of_shards_is_refused(on_ranks, tmp_path: Path, make: Any) -> None:
    for message in on_ranks(2, partial(refusal, "paral_zero3", make, save_to=tmp_path / "x.ckpt")):
        assert "a tensor of which this rank holds only a shard" in message


def test_names_that_nothing_renames_are_listed(tmp_path: Path) -> None:
    losses("paral_ddp", OldVersion, save_to=tmp_path / "old.ckpt")
    with pytest.raises(CheckpointError, match=r"Missing in the checkpoint: first\.bias, first\.weight"):
        losses("paral_ddp", resume_from=tmp_path / "old.ckpt")


class Other(Resumable):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 9)
        self.extra = nn.Linear(2, 2)
        del self.out


class Regrouped(Resumable):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad and p.dim() > 1])


@pytest.mark.parametrize("label", ["paral_ddp", "paral_fsdp", "paral_zero2"])
def test_mismatches_are_listed_by_name(on_ranks, tmp_path: Path, label: str) -> None:
    path = tmp_path / "x.ckpt"
    on_ranks(2, partial(losses, "paral_ddp", save_to=path))

    for message in on_ranks(2, partial(refusal, label, Other, resume_from=path)):
        assert "Missing in the checkpoint: extra.bias, extra.weight." in message
        assert "Only in the checkpoint: out.bias, out.weight." in message
        assert "first.weight (checkpoint (7, 5), module (9, 5))" in message
    for message in on_ranks(2, partial(refusal, label, Regrouped, resume_from=path)):
        assert "Only in the checkpoint: first.bias, out.bias, scale, second.bias, tied.bias." in message


class Grown(Resumable):
    def __init__(self) -> None:
        super().__init__()
        self.grown = nn.Parameter(torch.ones(2), requires_grad=False)
        self.strict_loading = False


def test_loading_without_strict_takes_matching_entries(tmp_path: Path) -> None:
    whole = losses("paral_ddp", save_to=tmp_path / "x.ckpt")
    module = Grown()
    found = losses("paral_ddp", lambda: module, resume_from=tmp_path / "x.ckpt")
    assert module.grown.tolist() == [1.0, 1.0]
    assert_continues([found], [whole])


class AddsFilter(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        warnings.filterwarnings("ignore", "a pattern of the user")


def test_a_resume_within_an_epoch_warns_of_nothing_and_keeps_the_users_filters(tmp_path: Path) -> None:
    def fit(callback: Callback, path: str | None) -> None:
        trainer = quiet_trainer(strategy="paral_ddp", devices=1, max_epochs=1, callbacks=[callback])
        trainer.fit(Resumable(), DataLoader(range(NUM_BATCHES)), ckpt_path=path)  # type: ignore[arg-type]

    path = str(tmp_path / "x.ckpt")
    fit(SaveOnce(path), None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit(AddsFilter(), path)
        patterns = [message.pattern for _, message, *_ in warnings.filters if message is not None]

    assert "a pattern of the user" in patterns
    assert [each for each in warned if "ended before the epoch ended" in str(each.message)] == []
