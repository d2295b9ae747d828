"""Check before training that the installed libraries have every private name this package uses.

Otherwise, after a library has renamed an attribute, code that reads it would fail in the middle of a run, and code that
sets it would silently have no effect.
"""

import importlib
import pkgutil
from functools import cache
from typing import Any

from lightning_paral.compat.private_name import PrivateName, entries, is_named_by

# Slow to import, and not needed by every run. It imports its private names directly, so that a missing one raises an
# ImportError at once.
_NOT_CHECKED = {"lightning_paral.compat.torch.distributed_checkpoint"}


@cache
def check_names(*libraries: str) -> None:
    """Raise a `PrivateNameError` if a library lacks a name that is used. A check that has passed is not repeated.

    Args:
        libraries: `"torch"`, `"lightning"` or `"deepspeed"`. The function imports them.
    """
    for library in libraries:
        for entry in _entries(library):
            entry.resolve()


def check_instance(library: str, instance: Any) -> None:
    """Raise a `PrivateNameError` if `instance`, whose class `library` defines, lacks an attribute that is used."""
    cls: Any = type(instance)
    classes = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
    for entry in _entries(library):
        owner, _, name = entry.name.rpartition(".")
        # Some attributes are set only in some configurations, or later: the code of the class contains their names.
        if entry.on_instances and owner in classes and not (hasattr(instance, name) or is_named_by(cls, name)):
            raise entry.error("instances do not have it")


@cache
def _entries(library: str) -> tuple[PrivateName, ...]:
    """Return the entries that are used with the installed version."""
    package = importlib.import_module(f"lightning_paral.compat.{library}")
    names = {info.name for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")} - _NOT_CHECKED
    tables = [getattr(importlib.import_module(name), "NAMES", {}) for name in sorted(names)]
    return tuple(entry for table in tables for entry in entries(table) if entry.is_used)
