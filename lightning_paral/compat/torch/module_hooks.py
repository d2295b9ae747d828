"""The dictionaries in which a module keeps its hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import _WrappedHook

from lightning_paral.compat.private_name import PrivateName

FORWARD = ("_forward_pre_hooks", "_forward_hooks")
"""Dictionaries of the hooks that run around forward."""
ALL = (*FORWARD, "_backward_pre_hooks", "_backward_hooks")
"""Dictionaries of all hooks that run in a step."""
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
"""Dictionaries of flags, by hook id, that specify how forward hooks are called."""
STATE_DICT = (
    *("_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Dictionaries of the hooks that run in `state_dict` and `load_state_dict`."""

NAMES = (
    *(
        PrivateName(
            name=f"torch.nn.Module.{name}",
            purpose="to remove or replace hooks on the user's modules",
            reason="only the code that registers a hook gets the handle that removes it",
            seen="torch 2.11 to 2.13",
            on_instances=True,
        )
        for name in (*ALL, *FLAGS, *STATE_DICT)
    ),
    PrivateName(
        name="torch.nn.modules.module._WrappedHook.hook",
        purpose="to find the function that the user registered as a state-dict hook",
        reason="torch wraps the function in an object of this private class",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
)


def hooks_in(module: Module, name: str) -> dict[int, Any]:
    """Return the dictionary `name` of hooks or flags of `module`."""
    hooks: dict[int, Any] = getattr(module, name)
    return hooks


def forward_hooks(module: Module) -> dict[int, Any]:
    """Return the forward hooks of `module`."""
    return hooks_in(module, "_forward_hooks")


def unwrapped(hook: Any) -> Any:
    """Return the function that was registered as `hook`, which torch may have wrapped."""
    return hook.hook if isinstance(hook, _WrappedHook) else hook


@contextmanager
def without_fsdp_loading(module: Module) -> Iterator[None]:
    """Make `load_state_dict` of `module` call none of FSDP2's hooks inside the block, which expect shards."""
    tables = [hooks_in(module, name) for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")]
    before = [dict(table) for table in tables]
    for table in tables:
        for key, hook in list(table.items()):
            if getattr(unwrapped(hook), "__module__", "").startswith("torch.distributed.fsdp."):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


def hook_tables(module: Module) -> dict[str, dict[int, Any]]:
    """Return all dictionaries of hooks and flags of `module`, by attribute name."""
    return {name: hooks_in(module, name) for name in (*ALL, *FLAGS, *STATE_DICT)}
