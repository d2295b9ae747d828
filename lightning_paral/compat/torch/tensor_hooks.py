"""Lists of the hooks on tensors."""

from typing import Any

from torch import Tensor

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "torch.Tensor": {
        "_backward_hooks": "call hooks of sharded parameters when the unsharded parameters get their gradients",
        "_post_accumulate_grad_hooks": "reject hooks on parameters that would never be called",
    },
}


def gradient_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks that `register_hook` has registered on a leaf tensor, by id."""
    return tensor._backward_hooks or {}


def post_accumulate_grad_hooks(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks that `register_post_accumulate_grad_hook` has registered on a tensor, by id."""
    hooks: dict[int, Any] = tensor._post_accumulate_grad_hooks or {}
    return hooks
