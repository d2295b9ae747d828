"""Recognize the attributes, hooks and classes that engines add to modules that they shard, and remove them."""

from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_paral.compat.deepspeed.modules import is_zero_attribute
from lightning_paral.compat.torch import module_hooks
from lightning_paral.compat.torch.fsdp_state import is_of_fsdp

_ENGINES = ("torch.distributed", "deepspeed", "lightning_paral")


def describes_shards(name: str) -> bool:
    """Return whether ZeRO describes its shards in this attribute of a module or parameter."""
    return is_zero_attribute(name)


def is_left_partitioned(parameter: Tensor) -> bool:
    """Return whether a failed run under ZeRO stage 3 left `parameter` partitioned, so that it lacks its values."""
    return any(map(describes_shards, vars(parameter)))


def class_without_engine(kind: type) -> type:
    """Return the class that a module of class `kind` had before `fully_shard` replaced it by a subclass."""
    return next(base for base in kind.__mro__ if issubclass(base, Module) and not issubclass(base, FSDPModule))


def attributes_without_engine(attributes: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the attributes of a module of class `kind` without the attributes and hooks that an engine has added."""
    kept = {}
    for name, value in attributes.items():
        if name in (*module_hooks.ALL, *module_hooks.FLAGS, *module_hooks.OF_STATE_DICTS) and isinstance(value, dict):
            kept[name] = type(value)((key, hook) for key, hook in value.items() if not _is_of_engine(hook))
        elif name == "_parameters" and isinstance(value, dict):
            kept[name] = dict(value.items())
        elif not _is_engines_name(name) and not (_replaces(name, value, kind) and _is_of_engine(value)):
            kept[name] = value
    hooks = {key for name in module_hooks.FORWARD for key in kept.get(name, ())}
    for name in module_hooks.FLAGS:
        if isinstance(kept.get(name), dict):
            kept[name] = type(kept[name])((key, flag) for key, flag in kept[name].items() if key in hooks)
    return kept


def _is_engines_name(name: str) -> bool:
    return is_of_fsdp(name) or is_zero_attribute(name) or name.startswith("applied_pre_backward")


def _replaces(name: str, value: Any, kind: type) -> bool:
    """Return whether an attribute shadows one of class `kind`, or is a local function or class."""
    return hasattr(kind, name) or "<locals>" in getattr(value, "__qualname__", "")


def _is_of_engine(value: Any) -> bool:
    """Return whether a class, a function or an object comes from an engine or from this package."""
    value = module_hooks.unwrapped(value)
    if isinstance(value, partial):
        return _is_of_engine(value.func)
    if isinstance(value, MethodType):
        return _is_of_engine(value.__func__) or _is_of_engine(value.__self__)
    where: tuple[str | None, ...]
    if isinstance(value, FunctionType):
        # The two differ for decorated functions: engines decorate their hooks, and methods of users.
        where = (value.__module__, value.__globals__.get("__name__"))
    elif isinstance(value, Tensor | Module):
        return False
    else:
        where = (getattr(value if isinstance(value, type) else type(value), "__module__", None),)
    return any(f"{name}.".startswith(f"{engine}.") for name in where for engine in _ENGINES)
