"""Rows about backward passes and optimizer steps by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.contract.user_code.gradients import GRAD
from tests.contract.user_code.models import Manual, Supervised
from tests.contract.user_code.rows import add, row

Act = Callable[[Any, Any], None]
BACKWARD = r"loss\.backward\(\)|a backward pass of its own"
"""What refusals of most rows name."""


def add_step(label: str, sentence: str, act: Act, **options: Any) -> None:
    """Register a row with manual optimization, whose step is `act(module, batch)`."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        act(self, batch)

    add(f"step by hand, {label}", sentence, type("ByHand", (Manual,), {"training_step": training_step}), **options)


def by_trainer(module: Any, batch: Any) -> None:
    optimizer = module.trainer.optimizers[0]
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch))
    optimizer.step()


def raw_backward(module: Any, batch: Any) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.loss(batch).backward()
    optimizer.optimizer.step()


def after_saliency(module: Any, batch: Any) -> None:
    module.loss(batch).backward()
    by_trainer(module, batch)


def closure_of_two(module: Any, batch: Any) -> None:
    optimizer = module.optimizers()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module.loss(batch)
        module.manual_backward(0.5 * loss)
        module.manual_backward(0.5 * module.loss(batch))
        return loss

    optimizer.step(closure=closure)
    optimizer.zero_grad()


def without_zero_grad(module: Any, batch: Any) -> None:
    module.manual_backward(module.loss(batch))
    module.optimizers().step()


add_step(
    "trainer.optimizers",
    "self.trainer.optimizers[0].step().",
    by_trainer,
    names=f"{GRAD}|stepped an optimizer on its own",
)
add_step(
    "optimizer.optimizer", "loss.backward() and optimizer.optimizer.step().", raw_backward, names=f"{GRAD}|{BACKWARD}"
)
add_step(
    "after saliency",
    "loss.backward(), zero_grad(), then manual_backward() and a step.",
    after_saliency,
    names=f"{GRAD}|{BACKWARD}",
)
add_step("a closure", "optimizer.step(closure) with zero_grad() and two manual_backward() inside.", closure_of_two)
add_step("never zeroed", "manual_backward() and step() without zero_grad().", without_zero_grad, names="not zeroed")


class Again(Supervised):
    """Keeps the batch for hooks."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch = batch


@row("loss.backward() in on_after_backward", names=BACKWARD)
class BackwardInHook(Again):
    """loss.backward() of a second loss in on_after_backward."""

    def on_after_backward(self) -> None:
        self.loss(self.batch).backward()


@row("loss.backward() for saliency in a hook", names=BACKWARD)
class SaliencyInHook(Again):
    """loss.backward() and self.zero_grad() in on_train_batch_end."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.loss(self.batch).backward()
        self.zero_grad()


@row("optimizer_zero_grad, never", names="not zeroed")
class NeverZero(Supervised):
    """optimizer_zero_grad overridden to do nothing: gradients add up over the epoch."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        pass


@row("optimizer_step, twice", names="without zero_grad")
class SteppingTwice(Supervised):
    """optimizer.step(closure), then optimizer.step() with the same gradients."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(optimizer_closure)
        optimizer.step()


class ClosureTwice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        super().step()
        return closure()


@row("optimizer that evaluates its closure twice", names="evaluates its closure|may not be elementwise")
class WithClosureTwice(Supervised):
    """An optimizer whose step calls the closure before and after the update."""

    def configure_optimizers(self) -> Any:
        return ClosureTwice(self.parameters(), lr=0.05)
