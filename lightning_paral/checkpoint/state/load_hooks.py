"""Load-state-dict pre-hooks of modules, which convert the entries that older versions of a module saved."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_paral.compat.torch.modules import load_hooks, save_own, set_load_hooks, set_versions, versions_in


def has_load_hooks(module: Module) -> bool:
    """Return whether `module` or a submodule has load-state-dict pre-hooks."""
    return any(load_hooks(part) for part in module.modules())


def run_load_hooks(module: Module, state_dict: Mapping[str, Any], strict: bool) -> "OrderedDict[str, Any]":
    """Run all hooks in the order of `Module.load_state_dict` on a copy of `state_dict`, and return the copy."""
    changed = OrderedDict(state_dict)
    about = versions_in(state_dict) or {}
    for name, part in module.named_modules(remove_duplicate=False):
        run_own_load_hooks(part, changed, f"{name}." if name else "", about.get(name, {}), strict, [], [], [])
    if about:
        set_versions(changed, about)
    return changed


def run_own_load_hooks(part: Module, state_dict: Mapping[str, Any], *about: Any) -> None:
    """Run the hooks of `part`, but not of its submodules, with the arguments of `Module._load_from_state_dict`."""
    for hook in load_hooks(part).values():
        hook(state_dict, *about)


@contextmanager
def without_load_hooks(module: Module, *, recurse: bool = True) -> Iterator[None]:
    """Disable the hooks of `module` inside the context, so that entries already converted are not converted again.

    Args:
        module: the module.
        recurse: whether to disable the hooks of its submodules as well.
    """
    hooks = [(part, load_hooks(part)) for part in (module.modules() if recurse else (module,))]
    try:
        for part, _ in hooks:
            set_load_hooks(part, OrderedDict())
        yield
    finally:
        for part, part_hooks in hooks:
            set_load_hooks(part, part_hooks)


def names_to_load(module: Module) -> dict[str, Any]:
    """Return parameters, buffers and extra states by the names under which `Module.load_state_dict` looks them up.

    The names in `module.state_dict()` may differ, because hooks can change them. Entries that occur only there are
    included.
    """
    own: OrderedDict[str, Any] = OrderedDict()
    for name, part in module.named_modules(remove_duplicate=False):
        save_own(part, own, f"{name}." if name else "")
    known = {id(value) for value in own.values() if isinstance(value, Tensor)}
    saved: dict[str, Any] = module.state_dict(keep_vars=True)
    return own | {name: value for name, value in saved.items() if name not in own and id(value) not in known}
