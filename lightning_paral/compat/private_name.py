"""Declarations of the private names that `compat` uses, which are checked by tests and at the start of a run."""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from platform import python_version
from types import CodeType, FunctionType
from typing import Any

from lightning_paral.errors import PrivateNameError

Names = Mapping[str, Mapping[str, str]]
"""Private names by the path of their owner, each with what it is used for, as an infinitive without "to".

A name is written `name`, or `name(a, b)` if callers or replacements rely on its parameters `a` and `b`, or `.name` if
only instances of the owner have it: a class sets it on its instances, or a function on its argument. `>=2.12` or
`<2.12` after it means that it is used with these versions of the library only.
"""

TESTED = {
    "torch": "torch 2.11 to 2.13",
    "lightning": "lightning 2.6.1 to 2.6.6",
    "torchmetrics": "torchmetrics 1.7 to 1.9",
    "deepspeed": "deepspeed 0.19.8",
}
"""The versions in which tests have found the names."""

_ENTRY = re.compile(r"(?P<dot>\.?)(?P<last>\w+)(?:\((?P<parameters>.*)\))?(?: >=(?P<since>\S+))?(?: <(?P<before>\S+))?")


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """A private name of torch, Lightning, torchmetrics or DeepSpeed, and why it is used; see `Names`."""

    name: str
    """The dotted path, beginning with the library: `torch.nn.Module._parameters`."""
    purpose: str
    """What the name is used for: "read a tensor's version counter"."""
    parameters: tuple[str, ...] | None = None
    on_instances: bool = False
    since: str = ""
    before: str = ""

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

    def error(self, difference: str) -> PrivateNameError:
        """Return the error for an installed version that differs from the tested ones.

        Args:
            difference: a clause that says how it differs, such as `"there is no such name"`.
        """
        library = self.name.partition(".")[0]
        return PrivateNameError(
            f"lightning_paral uses the private name {self.name} to {self.purpose}, but in {library} {version(library)} "
            f"{difference}. It was tested with {TESTED[library]}: install one of these versions."
        )


def entries(names: Names) -> tuple[PrivateName, ...]:
    """Return the entries of a table."""
    return tuple(
        _entry(owner, key, purpose) for owner, attributes in names.items() for key, purpose in attributes.items()
    )


def _entry(owner: str, key: str, purpose: str) -> PrivateName:
    found = _ENTRY.fullmatch(key)
    assert found is not None, key
    return PrivateName(
        name=f"{owner}.{found['last']}",
        purpose=purpose,
        parameters=None if found["parameters"] is None else tuple(found["parameters"].split(", ")),
        on_instances=bool(found["dot"]),
        since=found["since"] or "",
        before=found["before"] or "",
    )


def named(names: Names, last: str) -> PrivateName:
    """Return the entry of a table whose path ends with `last`."""
    return next(entry for entry in entries(names) if entry.name.endswith(f".{last}"))


def replace(instance: object, name: str, value: Any) -> None:
    """Set the private attribute `name` of `instance`, which must already have it.

    Raises:
        PrivateNameError: `instance` has no such attribute, so nothing would read the value.
    """
    if not hasattr(instance, name):
        library = type(instance).__module__.partition(".")[0]
        raise PrivateNameError(
            f"lightning_paral sets the private attribute {name} of {type(instance).__name__}, which has none in this "
            f"version. It was tested with {TESTED.get(library, TESTED['lightning'])}: install one of these versions."
        )
    setattr(instance, name, value)


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
    in_python = library in sys.stdlib_module_names
    return _numbers(python_version() if in_python else version(library))


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
