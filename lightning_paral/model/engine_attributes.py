"""Recognize the attributes, hooks and classes that engines add to modules when they shard them."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_paral.compat.deepspeed.engine import is_zero_attribute
from lightning_paral.compat.torch.modules import hook_tables, is_for_instance

_before: WeakKeyDictionary[Module, tuple[set[str], dict[str, set[int]]]] = WeakKeyDictionary()
"""The names of the attributes of modules before an engine got them, and the keys of their hooks by table."""


def is_left_partitioned(parameter: Tensor) -> bool:
    """Return whether a failed run under ZeRO stage 3 left `parameter` partitioned, so that it lacks its values."""
    return any(map(is_zero_attribute, vars(parameter)))


def class_without_engine(cls: type) -> type:
    """Return the class that a module of class `cls` had before an engine replaced it with a subclass."""
    bases = [base for base in cls.__mro__ if issubclass(base, Module) and not is_for_instance(base)]
    return next(base for base in bases if not issubclass(base, FSDPModule))


def remember_attributes(root: Module) -> Callable[[], None]:
    """Remember what `root` and its submodules have before an engine gets them; return a function that forgets it."""
    parts = list(root.modules())
    for part in parts:
        _before[part] = set(vars(part)), {name: set(table) for name, table in hook_tables(part).items()}

    def forget() -> None:
        for part in parts:
            _before.pop(part, None)

    return forget


def attributes_without_engine(module: Module) -> dict[str, Any]:
    """Return the attributes of `module` without what an engine has added to them.

    Of those that it has got since `remember_attributes`, public ones are the user's, unless they are functions or hide
    attributes of the class. Others, and all hooks registered since then, are the engine's.
    """
    attributes = vars(module) | {"_parameters": dict(vars(module)["_parameters"])}
    if module not in _before:
        return attributes
    names, hooks = _before[module]
    for name, value in list(attributes.items()):
        if name in hooks:
            attributes[name] = type(value)((key, hook) for key, hook in value.items() if key in hooks[name])
        elif name not in names and (_is_not_a_value(name, value) or hasattr(type(module), name)):
            del attributes[name]
    return attributes


def _is_not_a_value(name: str, value: Any) -> bool:
    return name.startswith("_") or is_zero_attribute(name) or callable(value)
