"""`module.zero_grad()` inside a step, when the module has unsharded parameters and the shards have the gradients."""

from collections.abc import Sequence
from contextlib import ExitStack

from torch.nn import Module
from torch.optim import Optimizer


def zero_shards_too(module: Module, optimizers: Sequence[Optimizer], undo: ExitStack) -> None:
    """Make `module.zero_grad()` zero the gradients of the optimizers' shards, too, until `undo` is closed."""
    zero_what_is_shown = module.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        zero_what_is_shown(set_to_none)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none)

    vars(module)["zero_grad"] = zero_grad
    undo.callback(vars(module).pop, "zero_grad", None)
