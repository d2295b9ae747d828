"""The step hooks of an optimizer, and the mark that schedulers check."""

from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer

from lightning_paral.compat.private_name import PrivateName

_PRE, _POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"

NAMES = (
    *(
        PrivateName(
            name=f"torch.optim.Optimizer.{name}",
            purpose="to run the step hooks of the user's optimizer when another optimizer steps in its place",
            reason="only the step of the optimizer itself runs them",
            seen="torch 2.11 to 2.13",
            on_instances=True,
        )
        for name in (_PRE, _POST)
    ),
    PrivateName(
        name="torch.optim.lr_scheduler.LRScheduler._opt_called",
        purpose="to keep schedulers from warning that the optimizer has not stepped",
        reason="only the step of the optimizer itself sets it",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
)


def no_hooks() -> dict[str, Any]:
    """Return the attributes of an optimizer that has no step hooks."""
    return {name: OrderedDict() for name in (_PRE, _POST)}


def run_pre_hooks(optimizer: Optimizer) -> None:
    """Run the step pre-hooks of `optimizer`."""
    for hook in getattr(optimizer, _PRE, {}).values():
        hook(optimizer, (), {})


def run_post_hooks(optimizer: Optimizer) -> None:
    """Run the step post-hooks of `optimizer`."""
    for hook in getattr(optimizer, _POST, {}).values():
        hook(optimizer, (), {})


def mark_stepped(optimizer: Optimizer) -> None:
    """Mark `optimizer` as stepped for its schedulers."""
    vars(optimizer)["_opt_called"] = True
