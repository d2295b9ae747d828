"""The dictionaries in which a module keeps its hooks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import _WrappedHook

from lightning_paral.compat.private_name import Names

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

NAMES: Names = {
    "torch.nn.Module": {
        "._forward_pre_hooks": "remove or replace hooks on the user's modules",
        "._forward_hooks": "remove or replace hooks on the user's modules",
        "._backward_pre_hooks": "remove or replace hooks on the user's modules",
        "._backward_hooks": "remove or replace hooks on the user's modules",
        "._forward_pre_hooks_with_kwargs": "remove or replace hooks on the user's modules",
        "._forward_hooks_with_kwargs": "remove or replace hooks on the user's modules",
        "._forward_hooks_always_called": "remove or replace hooks on the user's modules",
        "._state_dict_pre_hooks": "remove or replace hooks on the user's modules",
        "._state_dict_hooks": "remove or replace hooks on the user's modules",
        "._load_state_dict_pre_hooks": "remove or replace hooks on the user's modules",
        "._load_state_dict_post_hooks": "remove or replace hooks on the user's modules",
    },
    "torch.nn.modules.module._WrappedHook": {
        ".hook": "find the function that the user registered as a state-dict hook",
    },
}


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
