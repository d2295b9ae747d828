"""Check at the start of a run that the installed DeepSpeed has every private name this package uses."""

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import lightning_paral.compat.deepspeed
from lightning_paral.compat.private_name import PrivateName


@cache
def check_names() -> None:
    """Raise a `PrivateNameError` if DeepSpeed lacks a name that exists without an engine. Imports DeepSpeed."""
    for entry in _entries():
        if not entry.on_instances:
            entry.resolve()


def check_instance(instance: Any) -> None:
    """Raise a `PrivateNameError` if `instance`, a DeepSpeed engine or optimizer, lacks an attribute."""
    kind: Any = type(instance)
    kinds = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    for entry in _entries():
        owner, _, name = entry.name.rpartition(".")
        if entry.on_instances and owner in kinds and not (hasattr(instance, name) or name in _set_by(kind)):
            raise entry.error("instances do not have it")


@cache
def _set_by(kind: type) -> frozenset[str]:
    """Return the names in the code of a class: some attributes are set only in some configurations."""
    codes = [
        method.__code__ for base in kind.__mro__ for method in vars(base).values() if isinstance(method, FunctionType)
    ]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names)


def _entries() -> Iterator[PrivateName]:
    package = lightning_paral.compat.deepspeed
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        yield from getattr(importlib.import_module(info.name), "NAMES", ())
