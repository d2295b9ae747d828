"""Check before training that the installed libraries have every private name this package uses.

Without an error at the start, what reads a renamed attribute fails midway, and what sets one does nothing.
"""

import importlib
import pkgutil
from functools import cache
from typing import Any

from lightning_paral.compat.private_name import PrivateName, is_named_by

# Slow to import, and not needed by every run. They import what they use by name: without it there is an error at once.
_LATER = {"lightning_paral.compat.lightning.command_line", "lightning_paral.compat.torch.distributed_checkpoint"}


@cache
def check_names(*libraries: str) -> None:
    """Raise a `PrivateNameError` if a library lacks a name; once per process.

    Args:
        libraries: `"torch"`, `"lightning"` or `"deepspeed"`; they are imported.
    """
    for library in libraries:
        for entry in _entries(library):
            entry.resolve()


def check_instance(library: str, instance: Any) -> None:
    """Raise a `PrivateNameError` if `instance`, of a class of the library's, lacks an attribute."""
    kind: Any = type(instance)
    kinds = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    for entry in _entries(library):
        owner, _, name = entry.name.rpartition(".")
        # Some attributes are set only in some configurations, or later.
        if entry.on_instances and owner in kinds and not (hasattr(instance, name) or is_named_by(kind, name)):
            raise entry.error("instances do not have it")


@cache
def _entries(library: str) -> tuple[PrivateName, ...]:
    """Return the entries that are used with the installed version."""
    package = importlib.import_module(f"lightning_paral.compat.{library}")
    names = {info.name for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")} - _LATER
    found = [entry for name in sorted(names) for entry in getattr(importlib.import_module(name), "NAMES", ())]
    return tuple(entry for entry in found if entry.is_used)
