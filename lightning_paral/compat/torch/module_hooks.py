"""The hooks on a module, by the dictionaries in which it keeps them."""

from typing import Any

from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

FORWARD = ("_forward_pre_hooks", "_forward_hooks")
"""The dictionaries of hooks that run with the forward."""
ALL = (*FORWARD, "_backward_pre_hooks", "_backward_hooks")
"""Those of all hooks."""

NAMES = tuple(
    PrivateName(
        name=f"torch.nn.Module.{name}",
        purpose="to take away hooks that were put on modules of the user's, or to put others in their place",
        reason="only who registers a hook gets the handle that removes it",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    )
    for name in ALL
)


def hooks_in(module: Module, name: str) -> dict[int, Any]:
    """Return one of the dictionaries of hooks on `module`."""
    hooks: dict[int, Any] = getattr(module, name)
    return hooks


def forward_hooks(module: Module) -> dict[int, Any]:
    """Return the hooks that run after the forward of `module`."""
    return hooks_in(module, "_forward_hooks")
