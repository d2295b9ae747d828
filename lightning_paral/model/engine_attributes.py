"""Recognize and remove the attributes, hooks and classes that engines add to modules when they shard them."""

from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_paral.compat.deepspeed.process import is_zero_attribute
from lightning_paral.compat.torch import modules
from lightning_paral.compat.torch.fsdp import is_fsdp_attribute
from lightning_paral.compat.torch.modules import is_for_instance

_ENGINES = ("torch.distributed", "deepspeed", "lightning_paral")


def describes_shards(name: str) -> bool:
    """Return whether `name` is an attribute of a module or parameter in which ZeRO describes its shards."""
    return is_zero_attribute(name)


def is_left_partitioned(parameter: Tensor) -> bool:
    """Return whether a failed run under ZeRO stage 3 left `parameter` partitioned, so that it lacks its values."""
    return any(map(describes_shards, vars(parameter)))


def class_without_engine(cls: type) -> type:
    """Return the class that a module of class `cls` had before an engine replaced it with a subclass."""
    bases = [base for base in cls.__mro__ if issubclass(base, Module) and not is_for_instance(base)]
    return next(base for base in bases if not issubclass(base, FSDPModule))


def attributes_without_engine(attributes: dict[str, Any], cls: type) -> dict[str, Any]:
    """Return the attributes of a module of class `cls`, without the attributes and hooks that an engine has added."""
    kept = {}
    for name, value in attributes.items():
        if name in (*modules.ALL, *modules.FLAGS, *modules.STATE_DICT) and isinstance(value, dict):
            kept[name] = type(value)((key, hook) for key, hook in value.items() if not _comes_from_engine(hook))
        elif name == "_parameters" and isinstance(value, dict):
            kept[name] = dict(value.items())
        elif not _is_engine_attribute(name) and not (_shadows(name, value, cls) and _comes_from_engine(value)):
            kept[name] = value
    hooks = {key for name in modules.FORWARD for key in kept.get(name, ())}
    for name in modules.FLAGS:
        if isinstance(kept.get(name), dict):
            kept[name] = type(kept[name])((key, flag) for key, flag in kept[name].items() if key in hooks)
    return kept


def _is_engine_attribute(name: str) -> bool:
    return is_fsdp_attribute(name) or is_zero_attribute(name)


def _shadows(name: str, value: Any, cls: type) -> bool:
    """Return whether `name` shadows an attribute of the class `cls`, or `value` is a local function or class."""
    return hasattr(cls, name) or "<locals>" in getattr(value, "__qualname__", "")


def _comes_from_engine(value: Any) -> bool:
    """Return whether a class, a function or an object comes from an engine or from this package."""
    value = modules.unwrapped(value)
    if isinstance(value, partial):
        return _comes_from_engine(value.func)
    if isinstance(value, MethodType):
        return _comes_from_engine(value.__func__) or _comes_from_engine(value.__self__)
    owners: tuple[str | None, ...]
    if isinstance(value, FunctionType):
        # `wraps` copies `__module__` but not the globals, so these differ for a hook of an engine that torch has
        # decorated, and for a user's method that an engine has decorated.
        owners = (value.__module__, value.__globals__.get("__name__"))
    elif isinstance(value, Tensor | Module):
        return False
    else:
        owners = (getattr(value if isinstance(value, type) else type(value), "__module__", None),)
    return any(f"{name}.".startswith(f"{engine}.") for name in owners for engine in _ENGINES)
