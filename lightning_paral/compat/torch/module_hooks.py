"""The hooks on a module, by the dictionaries in which it keeps them."""

from typing import Any

from torch.nn import Module
from torch.nn.modules.module import _WrappedHook

from lightning_paral.compat.private_name import PrivateName

FORWARD = ("_forward_pre_hooks", "_forward_hooks")
"""The dictionaries of hooks that run with the forward."""
ALL = (*FORWARD, "_backward_pre_hooks", "_backward_hooks")
"""Those of all hooks that run in a step."""
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
"""Those that say how hooks of the forward are called, by the number of the hook."""
OF_STATE_DICTS = (
    *("_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Those of hooks that run when a module is saved and loaded."""

NAMES = (
    *(
        PrivateName(
            name=f"torch.nn.Module.{name}",
            purpose="to take away hooks that were put on modules of the user's, or to put others in their place",
            reason="only who registers a hook gets the handle that removes it",
            seen="torch 2.11 to 2.13",
            on_instances=True,
        )
        for name in (*ALL, *FLAGS, *OF_STATE_DICTS)
    ),
    PrivateName(
        name="torch.nn.modules.module._WrappedHook.hook",
        purpose="to tell whose a hook is that is given the module",
        reason="load_state_dict hooks are kept inside such an object",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
)


def hooks_in(module: Module, name: str) -> dict[int, Any]:
    """Return one of the dictionaries of hooks on `module`."""
    hooks: dict[int, Any] = getattr(module, name)
    return hooks


def forward_hooks(module: Module) -> dict[int, Any]:
    """Return the hooks that run after the forward of `module`."""
    return hooks_in(module, "_forward_hooks")


def unwrapped(hook: Any) -> Any:
    """Return the function that was registered as `hook`, which torch may have wrapped."""
    return hook.hook if isinstance(hook, _WrappedHook) else hook


def hook_tables(module: Module) -> dict[str, dict[int, Any]]:
    """Return all dictionaries of hooks on `module`, and of how they are called, by the attribute's name."""
    return {name: hooks_in(module, name) for name in (*ALL, *FLAGS, *OF_STATE_DICTS)}
