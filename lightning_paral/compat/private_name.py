"""Declarations of the private names that `compat` uses, which are checked by tests and at the start of a run."""

import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from types import CodeType, FunctionType
from typing import Any

from lightning_paral.errors import PrivateNameError


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """A private name of torch, Lightning, torchmetrics or DeepSpeed, and why it is used."""

    name: str
    """The dotted path, beginning with the library: `torch.nn.Module._parameters`."""
    purpose: str
    """What the name is used for, as an infinitive: "to read a tensor's version counter"."""
    reason: str
    """Why no public name can be used instead."""
    seen: str
    """The versions in which tests have found it: "torch 2.11 to 2.13"."""
    upstream: str = ""
    """The upstream issue that asks for a public name, or that reports the defect worked around."""
    parameters: tuple[str, ...] | None = None
    """The names of the parameters that our callers or replacements rely on; `None` if none are checked."""
    on_instances: bool = False
    """Whether the last part is an attribute that only instances have: the rest of the path names a class that sets it
    on its instances, or a function that sets it on its argument. The check creates no instance, but searches the code
    of the class or function for the attribute's name."""
    since: str = ""
    """The first version with which the name is used, such as "2.12"; empty if there is none."""
    before: str = ""
    """The first version with which the name is no longer used; empty if there is none."""

    @property
    def is_used(self) -> bool:
        """Whether the name is used with the installed version of the library."""
        installed = _installed(self.name.partition(".")[0])
        return _numbers(self.since or "0") <= installed and (not self.before or installed < _numbers(self.before))

    def resolve(self) -> Any:
        """Return the object that has this name; for an attribute of instances, return their class.

        Raises:
            PrivateNameError: the installed version has no such name, or the function lacks one of `parameters`.
        """
        path, _, last = self.name.rpartition(".")
        try:
            owner = _find(path)
            found = owner if self.on_instances else getattr(owner, last)
        except (ImportError, AttributeError) as error:
            raise self.error("there is no such name") from error
        if self.on_instances and not is_named_by(owner, last):
            raise self.error(f"{path} has no attribute of that name")
        if self.parameters is not None:
            names = _parameters_of(found)
            if names is not None and not set(self.parameters) <= set(names):
                raise self.error(f"it takes ({', '.join(names)}), not {self.parameters}")
        return found

    def replace_on(self, instance: object, value: Any) -> None:
        """Set this attribute on `instance`, which must already have it.

        Raises:
            PrivateNameError: `instance` has no such attribute, so nothing would read the value.
        """
        last = self.name.rpartition(".")[2]
        if not hasattr(instance, last):
            raise self.error(f"{type(instance).__name__} has no attribute of that name")
        setattr(instance, last, value)

    def error(self, difference: str) -> PrivateNameError:
        """Return the error for an installed version that differs from the tested ones.

        Args:
            difference: a clause that says how it differs, such as `"there is no such name"`.
        """
        library = self.name.partition(".")[0]
        return PrivateNameError(
            f"lightning_paral uses the private name {self.name} {self.purpose}, but in {library} {version(library)} "
            f"{difference}. It was tested with {self.seen}: install one of these versions."
        )


def _parameters_of(function: Any) -> tuple[str, ...] | None:
    """Return the names of the parameters; `None` for a wrapper that takes any, or a function without a signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    return None if takes_any else tuple(parameters)


@cache
def _installed(library: str) -> list[int]:
    return _numbers(version(library))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:2]]


def _find(path: str) -> Any:
    """Return the module, class or function at a dotted path."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


def is_named_by(owner: Any, attribute: str) -> bool:
    """Return whether the code of a class, of one of its bases, or of a function contains the name `attribute`."""
    return any(
        attribute in vars(base) or attribute in vars(base).get("__annotations__", {}) or attribute in _names_in(base)
        for base in getattr(owner, "__mro__", (owner,))
    )


@cache
def _names_in(owner: Any) -> frozenset[str]:
    """Return the names and strings in the code of a function, or of a class without its bases.

    The names of parameters are not included.
    """
    # Reading the source would take a hundred times longer, and would also find names in comments and parameters.
    codes = [
        code for member in (vars(owner).values() if isinstance(owner, type) else (owner,)) for code in _codes(member)
    ]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
                names.add(constant.co_name)
            elif isinstance(constant, str):
                names.add(constant)
    return frozenset(names)


def _codes(member: Any) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions that it wraps, with or without `functools.wraps`."""
    waiting, seen = [member], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        waiting.append(getattr(each, "__dict__", {}).get("__wrapped__"))
        if isinstance(each, classmethod | staticmethod):
            waiting.append(each.__func__)
        elif isinstance(each, property):
            waiting += [each.fget, each.fset]
        elif isinstance(each, FunctionType):
            yield each.__code__
            for cell in each.__closure__ or ():
                with suppress(ValueError):  # the cell is empty
                    waiting.append(cell.cell_contents)
