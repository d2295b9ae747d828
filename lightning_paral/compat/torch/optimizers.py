"""Optimizers: operations on many tensors at once, step hooks, and the gradient scaler."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "torch": {
        "_foreach_mul_": "scale sharded gradients",
        "_foreach_copy_": "copy what steps have written to the shards of a unit",
    },
    "torch.optim.lr_scheduler.LRScheduler": {
        "._opt_called": "keep schedulers from warning that the optimizer has not stepped",
    },
    "torch.amp.GradScaler": {
        "_unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)": "make all ranks skip the step together",
    },
}


# Operations on many tensors at once, which launch fewer CUDA kernels than a loop over the tensors


foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_


# The step hooks of an optimizer, and the mark that schedulers check


def step_with_hooks(optimizer: Optimizer, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return `step(optimizer, *args, **kwargs)`, with the hooks of `optimizer` and of all optimizers around it.

    Raises:
        RuntimeError: a pre-hook returned something else than `None` or a pair of new arguments.
    """
    return Optimizer.profile_hook_step(step)(optimizer, *args, **kwargs)


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Run no step hooks of `optimizer`, nor those of all optimizers, inside the block."""
    tables = []
    registers = (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
    for register in (*registers, register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle: Any = register(_do_nothing)
        handle.remove()
        tables.append(handle.hooks_dict_ref())
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def _do_nothing(*_: Any) -> None:
    pass


def mark_stepped(optimizer: Optimizer) -> None:
    """Mark `optimizer` as stepped for its schedulers."""
    vars(optimizer)["_opt_called"] = True


# A gradient scaler whose subclasses define how gradients are unscaled


class UnscalingGradScaler(torch.amp.GradScaler):
    """Unscales gradients with a method that subclasses define.

    Raises:
        PrivateNameError: `GradScaler` in this version of torch unscales in a different way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        named(NAMES, "_unscale_grads_").resolve()
        super().__init__(*args, **kwargs)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return self.unscale_gradients(optimizer, inv_scale, found_inf)

    @abstractmethod
    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """Multiply the gradients of `optimizer` by `inv_scale`, in place, and check whether they are finite.

        Args:
            optimizer: the optimizer whose gradients are unscaled.
            inv_scale: the factor, a 0-dimensional tensor.
            found_inf: a tensor of shape `[1]` or `[]` with the value 0.0, which means that all gradients are finite.

        Returns:
            For each device, a tensor like `found_inf` that is not 0.0 if some gradient is not finite.
        """
