"""Autograd: the end of backward passes, transforms, hooks and versions of tensors."""

from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms, vmap
from torch.autograd import Variable, forward_ad

from lightning_paral.compat.private_name import Names
from lightning_paral.compat.torch.patches import replace_attributes

NAMES: Names = {
    "torch.Tensor": {
        "_version": "detect in-place writes to tensors",
        "_backward_hooks": "reject hooks on parameters that would never be called",
        "_post_accumulate_grad_hooks": "reject hooks on parameters that would never be called",
    },
    "torch.autograd.Variable": {"_execution_engine": "run a callback when a backward pass ends"},
    "torch._C._functorch": {
        "peek_interpreter_stack": "refuse transforms of torch.func around the layers of a pipeline",
    },
    "torch._functorch.eager_transforms": {
        "_wrap_tensor_for_grad(maybe_tensor)": "refuse parameters in torch.func.grad, which skips __torch_function__",
    },
    "torch._functorch.vmap": {
        "_add_batch_dim(self)": "refuse parameters in torch.func.vmap, which skips __torch_function__",
    },
    "torch.autograd.forward_ad": {"_current_level": "refuse forward-mode AD around the layers of a pipeline"},
}


# The version counter of a tensor

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return the number of in-place operations that have written to a tensor or its views, which share the counter."""


def identity_of(tensor: Tensor) -> tuple[int, int]:
    """Return what changes if another tensor takes the place of `tensor`, or an operation writes to it in place."""
    return id(tensor), -1 if tensor.is_inference() else version_of(tensor)


# Lists of the hooks on tensors


def gradient_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks that `register_hook` has registered on a leaf tensor, by id."""
    return tensor._backward_hooks or {}


def post_accumulate_grad_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks that `register_post_accumulate_grad_hook` has registered on a tensor, by id."""
    hooks: dict[int, Any] = tensor._post_accumulate_grad_hooks or {}
    return hooks


# Callbacks at the end of a backward pass


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward pass. Must be called from a hook of that pass."""
    Variable._execution_engine.queue_callback(callback)


# Notice transforms of `torch.func`, and forward-mode AD


def before_transforms(call: Callable[[Any], None]) -> Callable[[], None]:
    """Call `call` with each input of the transforms of `torch.func`, and return a function that undoes this."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(value: Any, *args: Any, **kwargs: Any) -> Any:
            call(value)
            return function(value, *args, **kwargs)

        return run

    undo = ExitStack()
    for module, name in ((vmap, "_add_batch_dim"), (eager_transforms, "_wrap_tensor_for_grad")):
        undo.callback(replace_attributes(module, {name: around(getattr(module, name))}))
    return undo.close


def is_in_transform() -> bool:
    """Return whether the running code is inside a transform of `torch.func`, or a level of forward-mode AD."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
