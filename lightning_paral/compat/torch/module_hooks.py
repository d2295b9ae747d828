"""Hooks that modules have."""

from collections.abc import MutableMapping
from typing import Any

from torch.nn import Module

from lightning_paral.compat.private_name import PrivateName

HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Names of the attributes in which a module keeps its hooks, by number."""
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
"""Names of the attributes in which a module keeps how hooks are to be called, by the number of the hook."""

NAMES = tuple(
    PrivateName(
        name=f"torch.nn.Module.{name}",
        purpose="to take the hooks of a run off modules, and leave others",
        reason="hooks go by handles, which engines keep to themselves",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    )
    for name in (*HOOKS, *FLAGS)
)


def hook_tables(module: Module) -> dict[str, MutableMapping[int, Any]]:
    """Return the dictionaries in which `module` keeps its hooks and what concerns them, by the attribute's name."""
    return {name: getattr(module, name) for name in (*HOOKS, *FLAGS)}
