"""Autograd: the end of backward passes, transforms, hooks and versions of tensors."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch.autograd import Variable, forward_ad

from lightning_paral.compat.private_name import Names

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
]

NAMES: Names = {
    "torch.Tensor": {
        "_version": "detect in-place writes to tensors",
        "_backward_hooks": "call hooks of sharded parameters when the unsharded parameters get their gradients",
        "_post_accumulate_grad_hooks": "reject hooks on parameters that would never be called",
        "_base": "recognize that FSDP2 asks whether a tensor is a view",
    },
    "torch._C": {
        "DisableTorchFunctionSubclass": "run torch's own operations inside __torch_function__",
        "DisableTorchFunction": "run operations that our TorchFunctionMode must not intercept",
    },
    "torch.autograd.Variable": {"_execution_engine": "run a callback when a backward pass ends"},
    "torch._C._functorch": {
        "peek_interpreter_stack": "refuse transforms of torch.func around the layers of a pipeline",
    },
    "torch.autograd.forward_ad": {"_current_level": "refuse forward-mode AD around the layers of a pipeline"},
}


# The version counter of a tensor

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return the number of in-place operations that have written to a tensor or its views, which share the counter."""


# Lists of the hooks on tensors


def gradient_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks that `register_hook` has registered on a leaf tensor, by id."""
    return tensor._backward_hooks or {}


def post_accumulate_grad_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks that `register_post_accumulate_grad_hook` has registered on a tensor, by id."""
    hooks: dict[int, Any] = tensor._post_accumulate_grad_hooks or {}
    return hooks


# The attributes by which code looks at the place of a tensor in the graph of autograd

GRAPH_ATTRIBUTES = frozenset({"grad_fn", "output_nr", *NAMES["torch.Tensor"]})
"""Names of attributes that depend on the tensor itself, not on its values."""


# Callbacks at the end of a backward pass


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward pass. Must be called from a hook of that pass."""
    Variable._execution_engine.queue_callback(callback)


# Notice transforms of `torch.func`, and forward-mode AD


def is_in_transform() -> bool:
    """Return whether the running code is inside a transform of `torch.func`, or a level of forward-mode AD."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
