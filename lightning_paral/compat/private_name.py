"""Declare the private names of libraries that `compat` uses, and check at the start of a run that they exist.

Otherwise, after a library has renamed an attribute, code that reads it would fail in the middle of a run, and code that
sets it would silently have no effect.
"""

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from lightning_paral.errors import PrivateNameError
from lightning_paral.tested_versions import TESTED_VERSIONS

Names = Mapping[str, Mapping[str, str]]
"""Private names by the path of their owner, each with what it is used for, as an infinitive without "to".

A name is written `name`, or `name(a, b)` if callers or replacements rely on its parameters `a` and `b`, or `.name` if
only instances of the owner have it: a class sets it on its instances, or a function on its argument. `>=2.12` or
`<2.12` after it means that it is used with these versions of the library only. `; ` separates names that serve the same
purpose.
"""

_TESTED = TESTED_VERSIONS | {"torchmetrics": ">=1.7,<2"}  # as in pyproject.toml

_ENTRY = re.compile(r"(?P<dot>\.?)(?P<last>\w+)(?:\((?P<parameters>.*)\))?(?: (?P<versions>\S+))?")
# Slow to import, and not needed by every run. It imports its private names directly, so that a missing one raises an
# ImportError at once.
_NOT_CHECKED = "lightning_paral.compat.torch.distributed_checkpoint"


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """A private name of torch, Lightning, torchmetrics or DeepSpeed, and why it is used; see `Names`."""

    name: str
    """The dotted path, beginning with the library: `torch.nn.Module._parameters`."""
    purpose: str
    """What the name is used for: "read a tensor's version counter"."""
    parameters: tuple[str, ...] = ()
    on_instances: bool = False
    versions: str = ""
    """A version specifier of the library, such as `<2.12`; empty for all versions."""

    @property
    def is_used(self) -> bool:
        """Whether the name is used with the installed version of the library."""
        library = self.name.partition(".")[0]
        return not self.versions or SpecifierSet(self.versions).contains(version(library), prereleases=True)

    def resolve(self) -> Any:
        """Return the object that has this name; for an attribute of instances, return their class.

        Raises:
            PrivateNameError: the installed version has no such name, or the function lacks one of `parameters`.
        """
        path, _, last = self.name.rpartition(".")
        try:
            found = pkgutil.resolve_name(path if self.on_instances else self.name)
        except (ImportError, AttributeError) as error:
            raise self.error("there is no such name") from error
        if self.on_instances and not _is_in_source(found, last):
            raise self.error(f"{path} has no attribute of that name")
        if self.parameters:
            taken = _parameters_of(found)
            if taken is not None and not set(self.parameters) <= set(taken):
                raise self.error(f"it takes ({', '.join(taken)}), not {self.parameters}")
        return found

    def error(self, difference: str) -> PrivateNameError:
        """Return the error for an installed version that differs from the tested ones.

        Args:
            difference: a clause that says how it differs, such as `"there is no such name"`.
        """
        library = self.name.partition(".")[0]
        return PrivateNameError(
            f"lightning_paral uses the private name {self.name} to {self.purpose}, but in {library} {version(library)} "
            f"{difference}. Install a version with which it was tested: {library}{_TESTED.get(library, '')}."
        )


def entries(names: Names) -> Iterator[PrivateName]:
    """Yield the entries of a table."""
    for owner, attributes in names.items():
        for keys, purpose in attributes.items():
            for found in map(_ENTRY.fullmatch, keys.split("; ")):
                assert found is not None, keys
                yield PrivateName(
                    name=f"{owner}.{found['last']}",
                    purpose=purpose,
                    parameters=tuple((found["parameters"] or "").split(", ")) if found["parameters"] else (),
                    on_instances=bool(found["dot"]),
                    versions=found["versions"] or "",
                )


def named(names: Names, last: str) -> PrivateName:
    """Return the entry of a table whose path ends with `last`."""
    return next(entry for entry in entries(names) if entry.name.endswith(f".{last}"))


@cache
def check_names(*libraries: str) -> None:
    """Raise a `PrivateNameError` if a library lacks a name that is used. A check that has passed is not repeated.

    Args:
        libraries: `"torch"`, `"lightning"` or `"deepspeed"`. The function imports them.
    """
    for library in libraries:
        package = importlib.import_module(f"lightning_paral.compat.{library}")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name != _NOT_CHECKED:
                for entry in entries(getattr(importlib.import_module(module.name), "NAMES", {})):
                    if entry.is_used:
                        entry.resolve()


def replace(instance: object, name: str, value: Any) -> None:
    """Set the private attribute `name` of `instance`, which must already have it.

    Raises:
        PrivateNameError: `instance` has no such attribute, so nothing would read the value.
    """
    if not hasattr(instance, name):
        raise no_attribute(instance, name)
    setattr(instance, name, value)


def no_attribute(instance: object, name: str) -> PrivateNameError:
    """Return the error for an attribute or method that is to be replaced and that `instance` does not have."""
    cls = type(instance)
    return PrivateNameError(
        f"lightning_paral replaces {cls.__module__}.{cls.__qualname__}.{name} during a run, but there is no such "
        f"attribute. Install versions with which it was tested: {', '.join(map(''.join, _TESTED.items()))}."
    )


def _parameters_of(function: Any) -> tuple[str, ...] | None:
    """Return the names of the parameters; `None` for a wrapper that takes any, or a function without a signature."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return None
    takes_any = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return None if takes_any <= {parameter.kind for parameter in parameters.values()} else tuple(parameters)


def _is_in_source(owner: Any, attribute: str) -> bool:
    """Return whether `attribute` is in a module that defines a function, or a class or one of its bases."""
    written = attribute.removeprefix(f"_{owner.__name__}") if "__" in attribute else attribute  # Python mangles names
    modules = {inspect.unwrap(base).__module__ for base in getattr(owner, "__mro__", (owner,))}
    as_attribute = re.compile(rf"""(?:[.'"]|def ){re.escape(written)}\b""")
    return any(as_attribute.search(_source_of(module)) for module in modules)


@cache
def _source_of(module: str) -> str:
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    return Path(path).read_text() if path.endswith(".py") else ""
