"""What ZeRO would reduce or apply wrongly is refused; overlapped backward passes equal one process."""

import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ParalZeROStrategy
from lightning_paral.errors import ParalError
from tests.models.regression import FEATURES, Regression, fit, regression_data
from tests.running import assert_same_fit, quiet_trainer


class Layered(Regression):
    """Has two layers that swap, or of which the second is left out, on rank 1 or in the second step."""

    def __init__(self, what: str, when: str) -> None:
        super().__init__()
        self.what, self.when = what, when
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        is_odd = torch.distributed.get_rank() == 1 if self.when == "on rank 1" else batch_idx == 1
        layers = [self.first, self.second]
        if is_odd or self.when == "always":
            layers = layers[::-1] if self.what == "swapped" else layers[:1]
        elif self.what == "left out" and self.when == "on rank 1":
            layers = layers[1:]
        for layer in layers:
            inputs = layer(inputs)
        return super().training_step([inputs, targets], batch_idx)


class ByHand(Regression):
    """Optimizes by hand, and does something in the second step."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        if self.what == "scaled":
            self.manual_backward(loss, torch.tensor(2.0))
        elif batch_idx == 0 or self.what != "loss.backward":
            self.manual_backward(loss)
        else:
            loss.backward()
        if self.what == "dropped":
            optimizer.zero_grad()
        if self.what == "read early" and batch_idx == 1:
            self.trainer.strategy.gradient_norm()  # type: ignore[attr-defined]
            self.manual_backward(super().training_step(batch, batch_idx))
        if self.what == "clipped early" and batch_idx == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        if self.what == "clamped":
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")
        if self.what != "not zeroed":
            optimizer.zero_grad()
        if self.what == "read late":
            self.trainer.strategy.gradient_norm()  # type: ignore[attr-defined]


class Several(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.hidden, self.out)]


class Unfreezing(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.hidden.requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.hidden.requires_grad_(True)


class Changing(Regression):
    """Changes its optimizer after each batch, or before the run."""

    def __init__(self, change: Callable[[Any], Any], early: bool = False) -> None:
        super().__init__()
        self.change, self.early = change, early

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return (self.change(optimizer) or optimizer) if self.early else optimizer

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.early:
            self.change(self.trainer.optimizers[0])


def first_of(optimizer: Any) -> Any:
    return optimizer.param_groups[0]["params"][0]


def give_state(optimizer: Any) -> None:
    optimizer.state[first_of(optimizer)]["step"] = torch.ones(())


def wrap_step(optimizer: Any) -> None:
    optimizer.step = partial(optimizer.step)


def adagrad(optimizer: Any) -> Any:
    return torch.optim.Adagrad(optimizer.param_groups[0]["params"])


REFUSED = {
    "swapped on a rank": (lambda: Layered("swapped", "on rank 1"), "different order than on other ranks.* paral_fsdp"),
    "swapped later": (
        lambda: Layered("swapped", "later"),
        "different order than on other ranks, or than in an earlier",
    ),
    "unused on a rank": (lambda: Layered("left out", "on rank 1"), "(first|second).weight, (first|second).bias"),
    "unused later": (lambda: Layered("left out", "later"), "got no gradient.* second.weight, second.bias"),
    "unused always": (lambda: Layered("left out", "always"), "second.weight, second.bias.* requires_grad_"),
    **{
        what: (lambda what=what: ByHand(what), message)  # type: ignore[misc]
        for what, message in {
            "loss.backward": r"Gradients came from loss.backward\(\).*manual_backward",
            "dropped": "zero_grad was called after a backward pass.* paral_fsdp",
            "not zeroed": "were not zeroed.* paral_fsdp",
            "read early": "after gradients of the same step were read",
            "read late": "There are no gradients now",
            "clipped early": "after gradients of the same step were read or clipped",
            "scaled": "got other arguments than the loss.* paral_fsdp",
            "clamped": "does not clip gradients by value.* paral_fsdp",
        }.items()
    },
    **{
        what: (lambda change=change: Changing(change), message)  # type: ignore[misc]
        for what, change, message in (
            ("states saved", lambda optimizer: optimizer.state_dict(), "optimizer.state was used.* paral_fsdp"),
            ("states added up", lambda optimizer: sum(optimizer.state.values()), "optimizer.state was used"),
            ("state set", lambda optimizer: optimizer.state.update({first_of(optimizer): {}}), "state was used"),
            ("states cleared", lambda optimizer: optimizer.state.clear(), "optimizer.state was used"),
            (
                "states replaced",
                lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
                "its state or its .*paral_fsdp",
            ),
            (
                "groups reversed",
                lambda optimizer: optimizer.param_groups[0]["params"].reverse(),
                "the optimizer got other parameters",
            ),
            ("step replaced", wrap_step, "or its step was replaced.* paral_fsdp"),
        )
    },
    "states from before": (lambda: Changing(give_state, early=True), "AdamW already has states.*ckpt_path.* paral_ddp"),
    "Adagrad": (lambda: Changing(adagrad, early=True), "replaces Adagrad .*paral_fsdp"),
    "several optimizers": (Several, "returned 2 optimizers.* paral_fsdp"),
    "unfreezing": (
        Unfreezing,
        "frozen or not in the module.*: hidden.weight, hidden.bias.* paral_fsdp",
    ),
}


def refused(stage: int) -> dict[str, Any]:
    """Return what is refused at a stage.

    Stage 1 reduces gradients after the backward pass, in whatever order they came. At stage 3, ranks that run other
    modules fail in their collectives.
    """
    left_out = {1: "swapped", 3: "on a rank"}.get(stage, "nothing")
    return {what: case for what, case in REFUSED.items() if left_out not in what}


def refusals(stage: int) -> list[str]:
    said = []
    for make, _ in refused(stage).values():
        strategy = ParalZeROStrategy(stage=stage, trust_optimizer=True)
        try:
            quiet_trainer(max_epochs=1, devices=2, strategy=strategy).fit(make(), regression_data(3, 2))
            said.append("")
        except ParalError as error:
            said.append(str(error))
        torch.distributed.barrier()
    return said


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_would_differ_from_one_process_is_refused(on_ranks, stage: int) -> None:
    for messages in on_ranks(2, refusals, stage):
        for (what, (_, expected)), message in zip(refused(stage).items(), messages, strict=True):
            assert re.search(expected, message), f"{what}: {message!r}"


class KeepingItsOptimizer(Regression):
    kept: Any = None

    def configure_optimizers(self) -> Any:
        self.kept = self.kept or super().configure_optimizers()
        return self.kept


def fit_again_with_the_same_optimizer(precision: Any) -> None:
    model = KeepingItsOptimizer()
    for is_again in (False, True):
        trainer = quiet_trainer(max_epochs=1, devices=2, strategy=ParalZeROStrategy(stage=2), precision=precision)
        expected = pytest.raises(ParalError, match="AdamW already has states") if is_again else nullcontext()
        with expected:
            trainer.fit(model, regression_data(2, 2))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])  # of bf16 weights, the states end with the run
def test_second_fit_with_the_same_optimizer_is_refused(on_ranks, precision: str) -> None:
    on_ranks(2, fit_again_with_the_same_optimizer, precision)


# Windows


class Manual(Regression):
    """Shows only by its step that a backward pass was the last of a window."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(0.5 * super().training_step(batch, batch_idx))
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


def fit_windows(num_ranks: int, accelerator: str = "cpu", **options: Any) -> list[Any]:
    def strategy() -> Any:
        return ParalZeROStrategy(**options) if options else "auto"

    windows = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    return [
        fit(Regression, 8, num_ranks, strategy=strategy(), accelerator=accelerator, **windows),
        fit(Manual, 8, num_ranks, strategy=strategy(), accelerator=accelerator),
    ]


def fit_windows_on_rank(stage: int, overlap: bool | None) -> list[Any]:
    # Several buckets, so that some are reduced while others fill.
    return fit_windows(2, stage=stage, overlap_comm=overlap, reduce_bucket_numel=200)


@pytest.mark.parametrize(("stage", "overlap"), [(1, None), (2, False), (2, True), (3, None)])
def test_windows_equal_one_process(on_ranks, stage: int, overlap: bool | None) -> None:
    ranks = on_ranks(2, fit_windows_on_rank, stage, overlap)
    for expected, *fits in zip(fit_windows(1), *ranks, strict=True):
        assert_same_fit(fits, expected)


def overlapped_at_stage_1() -> Any:
    result = fit(Regression, 8, 2, strategy=ParalZeROStrategy(stage=1, overlap_comm=True), accumulate_grad_batches=2)
    with pytest.raises(ParalError, match="overlap_comm=True at stage 1 needs automatic optimization"):
        fit(Manual, 2, 2, strategy=ParalZeROStrategy(stage=1, overlap_comm=True))
    return result


def test_overlap_at_stage_1_equals_one_process_under_automatic_optimization(on_ranks) -> None:
    assert_same_fit(on_ranks(2, overlapped_at_stage_1), fit(Regression, 8, 1, accumulate_grad_batches=2))
