"""The step hooks of an optimizer, and the mark that schedulers check."""

from collections import OrderedDict
from typing import Any

from torch.optim import Optimizer

from lightning_paral.compat.private_name import Names

_PRE, _POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"

NAMES: Names = {
    "torch.optim.Optimizer": {
        "._optimizer_step_pre_hooks": "run the hooks of the user's optimizer when another steps in its place",
        "._optimizer_step_post_hooks": "run the hooks of the user's optimizer when another steps in its place",
    },
    "torch.optim.lr_scheduler.LRScheduler": {
        "._opt_called": "keep schedulers from warning that the optimizer has not stepped",
    },
}


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
