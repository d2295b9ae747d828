"""Hooks that write when ZeRO is about to overwrite or free what they write to equal one process, or are refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ConfigurationError, ParalZeROStrategy
from lightning_paral.errors import CheckpointError
from tests.models.regression import Regression, fit, regression_data
from tests.running import assert_same_fit, quiet_trainer


def strategy(stage: int, **config: int) -> ParalZeROStrategy:
    sizes = {"stage3_param_persistence_threshold": 0} | config if stage == 3 else config
    return ParalZeROStrategy(stage=stage, deepspeed_config={"zero_optimization": sizes})


def scale(parameters: Any, by: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(by)


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


class KeepingToTheEnd(Keeping):
    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def on_train_end(self) -> None:
        scale(self.kept, 0.5)


class Using(Regression):
    """Writes to all weights in a hook, and counts the elements that are then gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        scale(self.parameters(), 0.9)
        parameters: list[Any] = list(self.parameters())
        self.gathered.append(sum(p.ds_numel for p in parameters if p.ds_status.name == "AVAILABLE"))


WRITING = [
    (make, precision) for make in (Shrinking, ShrinkingByHand, Keeping) for precision in ("32-true", "bf16-true")
]


def writing(stage: int) -> list[Any]:
    found: list[Any] = []
    for make, precision in WRITING:
        try:
            found.append(fit(make, 4, 2, strategy=strategy(stage), precision=precision))
        except ConfigurationError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_writes_before_a_step_and_to_kept_data_equal_one_process(on_ranks, stage: int) -> None:
    for (make, precision), *found in zip(WRITING, *on_ranks(2, writing, stage), strict=True):
        if make is Keeping and stage == 3:
            assert all("A tensor was written to that had shared memory" in error for error in found)
        else:
            expected = fit(make, 4, 1, precision=precision)
            assert_same_fit(found, expected, 1e-5 if precision == "32-true" else 3e-2)


TAKE: dict[str, Any] = {
    "detach": lambda model: [parameter.detach() for parameter in model.parameters()],
    "state_dict": lambda model: list(model.state_dict().values()),
    "view": lambda model: [parameter.view(-1) for parameter in model.parameters()],
}


class KeepingAliases(Keeping):
    """Writes to other aliases than `data`, after it has used the parameters."""

    take = "detach"

    def on_train_start(self) -> None:
        with torch.no_grad():
            self.kept = TAKE[self.take](self)

    def on_train_batch_end(self, *_: Any) -> None:
        if all(parameter.isfinite().all() for parameter in self.parameters()):
            super().on_train_batch_end()


def write_to_aliases(threshold: int, take: str) -> None:
    keeping = type("KeepingAliases", (KeepingAliases,), {"take": take})
    with pytest.raises(ConfigurationError, match="A tensor was written to that had shared memory with"):
        fit(keeping, 3, 2, strategy=strategy(3, stage3_param_persistence_threshold=threshold))


@pytest.mark.parametrize("threshold", [0, 100_000])  # DeepSpeed's default, with which it gathers these after each step
@pytest.mark.parametrize("take", TAKE)
def test_writes_to_memory_that_a_parameter_no_longer_has_are_refused(on_ranks, threshold: int, take: str) -> None:
    on_ranks(2, write_to_aliases, threshold, take)


def kept_to_the_end() -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fitted = fit(KeepingToTheEnd, 2, 2, strategy=strategy(3))
    return fitted, [str(each.message) for each in warned]


def test_write_that_comes_too_late_at_the_end_warns_and_leaves_what_was_trained(on_ranks) -> None:
    ranks = on_ranks(2, kept_to_the_end)
    assert_same_fit([fitted for fitted, _ in ranks], fit(Regression, 2, 1))
    assert any("At the end of the run: A tensor was written to" in message for message in ranks[0][1])


def use_all() -> tuple[Any, list[int]]:
    torch.manual_seed(3)
    model = Using()
    quiet_trainer(max_epochs=1, devices=2, strategy=strategy(3, stage3_max_live_parameters=100)).fit(
        model, regression_data(3, 2)
    )
    return (model.losses, dict(model.state_dict())), model.gathered


class UsingInOneProcess(Using):
    def on_train_batch_end(self, *_: Any) -> None:
        scale(self.parameters(), 0.9)


def test_hooks_leave_a_bounded_number_of_elements_gathered(on_ranks) -> None:
    fits, gathered = zip(*on_ranks(2, use_all), strict=True)
    assert_same_fit(list(fits), fit(UsingInOneProcess, 3, 1))
    assert gathered == ([98] * 3,) * 2  # hidden.weight, which alone has 256, was partitioned again


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
