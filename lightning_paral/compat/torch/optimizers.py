"""Optimizers: operations on many tensors at once, step hooks, and the gradient scaler."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.optim.optimizer as hooks_of_all
from torch import Tensor
from torch.optim import Optimizer

from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "torch": {
        "_foreach_mul_": "scale sharded gradients",
        "_foreach_copy_": "copy what steps have written to the shards of a unit",
        "_foreach_norm": "compute the norm of sharded gradients",
        "_amp_foreach_non_finite_check_and_unscale_": "unscale gradients as torch.amp.GradScaler does",
    },
    "torch.optim.Optimizer": {
        "._optimizer_step_pre_hooks": "run the hooks of the user's optimizer when another steps in its place",
        "._optimizer_step_post_hooks": "run the hooks of the user's optimizer when another steps in its place",
    },
    "torch.optim.optimizer": {
        "_global_optimizer_pre_hooks": "run the hooks of all optimizers around a step on local tensors",
        "_global_optimizer_post_hooks": "run the hooks of all optimizers around a step on local tensors",
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
foreach_norm = torch._foreach_norm
foreach_copy_ = torch._foreach_copy_
check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_


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
    owners = {
        optimizer: ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        hooks_of_all: ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
    }
    before = {owner: {name: getattr(owner, name) for name in names} for owner, names in owners.items()}
    for owner, tables in before.items():
        vars(owner).update({name: OrderedDict() for name in tables})
    try:
        yield
    finally:
        for owner, tables in before.items():
            vars(owner).update(tables)


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
