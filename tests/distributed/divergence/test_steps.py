"""Steps that some ranks skip, and epochs that some ranks end early, raise an error that names the ranks."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contract.cases import BY_LABEL, labels
from tests.distributed.divergence.modules import fit
from tests.models.linear import Linear

CASES = [BY_LABEL[label] for label in ("paral_ddp", "paral_fsdp")]
REMEDY = "All ranks must run the same steps"


class StepsItself(Linear):
    """Steps with an optimizer of its own, although Lightning optimizes."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def step_itself(self, hook: str) -> None:
        if hook == self.hook:
            with torch.enable_grad():
                loss = sum((parameter * dist.get_rank()).sum() for parameter in self.parameters())
            loss.backward()
            torch.optim.SGD(self.parameters(), lr=0.1).step()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.step_itself("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.step_itself("on_train_epoch_end")


def fit_stepping(strategy: str, hook: str) -> str:
    return fit(strategy, StepsItself(hook), {}, max_epochs=1)


@pytest.mark.parametrize("hook", ["training_step", "on_train_epoch_end"])
@pytest.mark.parametrize("strategy", labels(CASES))
def test_step_of_an_optimizer_of_ones_own_is_refused(in_own_world: Any, strategy: str, hook: str) -> None:
    for message in in_own_world(2, fit_stepping, strategy, hook):
        assert "SGD.step was called in a step or hook under automatic optimization" in message


class Skipping(Linear):
    """Skips work of batch 2 on rank 1, in the way that `kind` names."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self.kind = kind
        self.skips = rank == 1 or kind.endswith("on all")
        self.automatic_optimization = "manual" not in kind

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if self.skips and "-1" in self.kind and batch_idx == 2 else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        skips = self.skips and batch_idx == 2
        loss = super().training_step(batch, batch_idx)
        if self.kind.startswith("None"):
            return None if skips else loss
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            if not (skips and "backward" in self.kind):
                self.manual_backward(loss)
            if not (skips and "step" in self.kind):
                optimizer.step()
        return loss


def fit_skipping(strategy: str, kind: str) -> str:
    message = fit(strategy, Skipping(kind, int(os.environ["RANK"])), {}, max_epochs=2)
    if "ConfigurationError" in message:
        dist.destroy_process_group()  # ends the collective in which the other rank may wait
    return message


@pytest.mark.parametrize("strategy", labels(CASES))
def test_step_that_returns_none_is_named(in_own_world: Any, strategy: str) -> None:
    _, message = in_own_world(2, fit_skipping, strategy, "None")
    assert "training_step returned None on rank 1, for batch 2 of epoch 0" in message


@pytest.mark.parametrize("kind", ["-1", "manual step"])
@pytest.mark.parametrize("strategy", labels(CASES))
def test_skipped_work_is_named(in_own_world: Any, strategy: str, kind: str) -> None:
    messages = in_own_world(2, fit_skipping, strategy, kind)
    assert REMEDY in messages[1], messages


@pytest.mark.parametrize("kind", ["", "-1 on all", "manual", "manual step on all"])
def test_equal_ranks_train(on_ranks: Any, kind: str) -> None:
    assert on_ranks(2, fit_skipping, "paral_ddp", kind) == ["", ""]
