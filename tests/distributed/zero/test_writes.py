"""What user code does with parameters under ZeRO equals one process or is refused, and never lost."""

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_paral import ConfigurationError, Offload, ParalZeROStrategy
from lightning_paral.errors import CheckpointError
from tests.contract.cases import MAIN
from tests.models.regression import Regression, fit, regression_data
from tests.running import assert_same_fit, quiet_trainer


def strategy(stage: int, threshold: int = 0, **options: Any) -> ParalZeROStrategy:
    """Return a strategy that at stage 3 partitions parameters of more elements than the threshold."""
    sizes = {"stage3_param_persistence_threshold": threshold} if stage == 3 else {}
    return ParalZeROStrategy(stage=stage, deepspeed_config={"zero_optimization": sizes}, **options)


def scale(parameters: Any, by: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(by)


# Written at stages 1 and 2, refused at stage 3


class Shrinking(Regression):
    """Shrinks its weights before each step, which torch does before the closure runs the training step."""

    by = 0.8

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: scale(self.parameters(), self.by))
        return optimizer


class ShrinkingByHand(Shrinking):
    by = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.clip_gradients(optimizer, gradient_clip_val=5.0, gradient_clip_algorithm="norm")  # does nothing more
        optimizer.step()


class Keeping(Regression):
    """Writes after each batch to `data` that it keeps from the start of the run."""

    def on_train_start(self) -> None:
        self.kept = [parameter.data for parameter in self.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        scale(self.kept, 0.5)


WRITING = [
    (make, precision) for make in (Shrinking, ShrinkingByHand, Keeping) for precision in ("32-true", "bf16-true")
]


def fits(stage: int) -> list[Any]:
    return [fit(make, 4, 2, strategy=strategy(stage), precision=precision) for make, precision in WRITING]


@pytest.mark.parametrize("stage", [1, 2])
def test_writes_before_a_step_and_to_kept_data_equal_one_process(on_ranks, stage: int) -> None:
    for (make, precision), *found in zip(WRITING, *on_ranks(2, fits, stage), strict=True):
        expected = fit(make, 4, 1, precision=precision)
        assert_same_fit(found, expected, 1e-5 if precision == "32-true" else 3e-2)


class KeepingDetached(Keeping):
    def on_train_start(self) -> None:
        self.kept = [parameter.detach() for parameter in self.parameters()]


class KeepingViews(Keeping):
    def on_train_start(self) -> None:
        with torch.no_grad():
            self.kept = [parameter.view(-1) for parameter in self.parameters()]


class WritingInForward(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.hidden.weight.data.mul_(0.5)
        return super().training_step(batch, batch_idx)


class Copying(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        copy.deepcopy(self.out)


class Reading(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("norm", self.hidden.weight.norm())


class Transforming(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("sum", torch.vmap(torch.sum)(self.hidden.weight).sum())


REFUSED = {
    Shrinking: "was used outside of the forward pass|was written to",
    Keeping: "was used outside of the forward pass|was written to",
    KeepingDetached: "was used outside of the forward pass|was written to",
    KeepingViews: "was used outside of the forward pass|was written to",
    WritingInForward: r"'hidden.weight', or a tensor .* was written to .*GatheredParameters\(.*paral_zero2",
    Copying: r"'out.weight' was copied, .*full_parameter\(",
}


def refuse_all(threshold: int) -> None:
    for make, message in REFUSED.items():
        with pytest.raises(ConfigurationError, match=message):
            fit(make, 3, 2, strategy=strategy(3, threshold))
    if threshold == 0:
        with pytest.raises(ConfigurationError, match=r"'hidden.weight' was used .*full_parameter\(.*paral_fsdp"):
            fit(Reading, 3, 2, strategy=strategy(3))
        with pytest.raises(ConfigurationError, match=r"'hidden.weight' was given to a transform .*paral_zero2"):
            fit(Transforming, 3, 2, strategy=strategy(3))


@pytest.mark.parametrize("threshold", [0, 100_000])  # DeepSpeed's default, with which it gathers these after each step
def test_stage_3_refuses_what_would_be_lost(on_ranks, threshold: int) -> None:
    on_ranks(2, refuse_all, threshold)


class WritingAtTheEnd(Regression):
    def on_train_end(self) -> None:
        scale(self.parameters(), 0.5)


def write_at_the_end() -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fitted = fit(WritingAtTheEnd, 2, 2, strategy=strategy(3, 100_000))
    return fitted, [str(each.message) for each in warned]


def test_write_that_comes_too_late_at_the_end_warns_and_leaves_what_was_trained(on_ranks) -> None:
    ranks = on_ranks(2, write_at_the_end)
    assert any("At the end of the run: 'hidden.weight'" in message for message in ranks[0][1])


# What stage 3 allows


class Using(Regression):
    """Uses parameters of other modules in a step, and the metadata of all in a hook."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().training_step(batch, batch_idx) + 0.01 * penalty + 0.01 * self.out.weight.abs().sum()

    def on_train_batch_end(self, *_: Any) -> None:
        shapes = [(*p.shape, p.numel(), p.dim(), p.dtype, p.device.type, p.requires_grad) for p in self.parameters()]
        assert shapes[0] == (32, 8, 256, 2, torch.float32, "cpu", True)


class Returning(Regression):
    """Has a module that returns its parameter, and one that returns a parameter of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = Table(nn.Parameter(torch.ones(2, 32))), Table([self.out.weight])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        penalty = self.table().square().sum() + self.other()[0].square().sum()
        return super().training_step(batch, batch_idx) + 0.01 * penalty

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"hidden": self.hidden.weight, "table": [self.table()]}


class Table(nn.Module):
    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values

    def forward(self) -> Any:
        return self.values


def fit_and_return(num_ranks: int, threshold: int) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Returning()
    options = {} if num_ranks == 1 else {"strategy": strategy(3, threshold)}
    trainer = quiet_trainer(max_epochs=1, devices=num_ranks, **options)
    trainer.fit(model, regression_data(4, num_ranks))
    found = trainer.predict(model, regression_data(1, num_ranks))
    assert found is not None
    return (model.losses, dict(model.state_dict())), found[0]


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_parameters_that_modules_and_steps_return_are_full(on_ranks, threshold: int) -> None:
    fitted, found = zip(*on_ranks(2, fit_and_return, 2, threshold), strict=True)
    expected, returned = fit_and_return(1, 0)
    assert_same_fit(list(fitted), expected)
    for each in found:
        torch.testing.assert_close(each, returned, rtol=1e-5, atol=1e-6)


class Clamping(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)


class ClampingGathered(Clamping):
    def on_train_batch_end(self, *_: Any) -> None:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.parameters()), modifier_rank=0):
            if self.global_rank == 0:
                super().on_train_batch_end()


def use_and_clamp(threshold: int) -> list[Any]:
    return [
        fit(make, 4, 2, strategy=strategy(3, threshold), precision=precision)
        for make, precision in ((Using, "32-true"), (ClampingGathered, "32-true"), (ClampingGathered, "bf16-true"))
    ]


@pytest.mark.parametrize("threshold", [0, 100_000])
def test_stage_3_gathers_in_forward_passes_and_by_deepspeeds_context(on_ranks, threshold: int) -> None:
    using, clamping, in_bf16 = zip(*on_ranks(2, use_and_clamp, threshold), strict=True)
    assert_same_fit(list(using), fit(Using, 4, 1))
    assert_same_fit(list(clamping), fit(Clamping, 4, 1))
    assert_same_fit(list(in_bf16), fit(Clamping, 4, 1, precision="bf16-true"), 3e-2)


# Master weights


STRATEGIES: dict[str, Callable[[], Any]] = {
    **{case.label: case.strategy for case in MAIN if case.needs_deepspeed},
    "partitioned": lambda: strategy(3),
}


def fit_in_bf16(label: str) -> list[Tensor]:
    torch.manual_seed(3)
    model = Regression()
    seen = []

    def look_at_masters(*_: Any) -> None:
        import deepspeed

        seen.append(model.trainer.strategy.full_parameter(model.out.weight))
        with torch.no_grad(), deepspeed.zero.GatheredParameters(model.out.weight, modifier_rank=0):
            model.out.weight[1] = 0.5

    model.on_train_batch_end = look_at_masters  # type: ignore[method-assign]
    trainer = quiet_trainer(max_epochs=1, devices=2, strategy=STRATEGIES[label](), precision="bf16-true")
    trainer.fit(model, regression_data(2, 2))
    return seen


@pytest.mark.parametrize("label", STRATEGIES)
def test_master_weights_change_only_where_weights_were_written(on_ranks, label: str) -> None:
    for first, second in on_ranks(2, fit_in_bf16, label):
        assert (first.bfloat16().float() != first).any()  # master weights have more precision
        moved = (second - first).abs()
        assert moved[0].max() < 0.05  # one step of AdamW with lr=1e-2
        assert ((second[1] - 0.5).abs() < 0.05).all()


def clamp_on_nvme() -> Any:
    folder = Path(tempfile.gettempdir(), "lightning_paral_tests_nvme")
    folder.mkdir(exist_ok=True)
    nvme = Offload("nvme", path=folder, buffer_numel=10_000)
    return fit(ClampingGathered, 5, 2, strategy=strategy(3, offload_optimizer=nvme, offload_parameters=nvme))


@pytest.mark.deepspeed_operators
def test_writes_reach_weights_on_nvme(on_ranks) -> None:
    assert_same_fit(on_ranks(2, clamp_on_nvme), fit(Clamping, 5, 1), 1e-5)


# States of only some parameters


class PartlyFrozen(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.hidden.requires_grad_(False)


def resume(path: Path, stage: int) -> None:
    with pytest.raises(CheckpointError, match=r"different numbers of steps, 0 to 2.* paral_fsdp"):
        quiet_trainer(max_epochs=2, devices=2, strategy=strategy(stage)).fit(
            Regression(), regression_data(2, 2), ckpt_path=path
        )


@pytest.mark.parametrize("stage", [2, 3])
def test_states_of_only_some_parameters_are_refused(on_ranks, tmp_path: Path, stage: int) -> None:
    trainer = quiet_trainer(max_epochs=1, devices=1)
    trainer.fit(PartlyFrozen(), regression_data(2, 1))
    trainer.save_checkpoint(tmp_path / "partial.ckpt")
    on_ranks(2, resume, tmp_path / "partial.ckpt", stage)
