"""Declare the private names that `compat` uses, so that the tests and the start of a run can check them."""

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
    """Dotted path from the library's top: `torch.nn.Module._parameters`."""
    purpose: str
    """What the name is used for, as an infinitive: "to read a tensor's version counter"."""
    reason: str
    """Why no public name will do."""
    seen: str
    """The versions that have it, as tested: "torch 2.11 to 2.13"."""
    upstream: str = ""
    """The upstream issue that asks for a public name, or reports the defect that is worked around."""
    parameters: tuple[str, ...] | None = None
    """Parameters that callers or replacements rely on, by name; `None` checks none."""
    on_instances: bool = False
    """Whether only instances have it: the last part is an attribute that the class before it sets on its instances, or
    that the function before it sets on its argument. Nothing is instantiated: their code has to name it."""
    since: str = ""
    """The first version in which it is used, such as "2.12"; empty for all."""
    before: str = ""
    """The first version in which it is no longer used; empty for none."""

    @property
    def is_used(self) -> bool:
        """Whether it is used with the installed version."""
        installed = _installed(self.name.partition(".")[0])
        return _numbers(self.since or "0") <= installed and (not self.before or installed < _numbers(self.before))

    def resolve(self) -> Any:
        """Return the object or, for an attribute of instances, the class.

        Raises:
            PrivateNameError: the installed version has no such name, or it takes other parameters.
        """
        path, _, last = self.name.rpartition(".")
        try:
            owner = _find(path)
            found = owner if self.on_instances else getattr(owner, last)
        except (ImportError, AttributeError) as error:
            raise PrivateNameError(self._complaint("there is no such name")) from error
        if self.on_instances and not is_named_by(owner, last):
            raise PrivateNameError(self._complaint(f"{path} has no attribute of that name"))
        if self.parameters is not None:
            names = _parameters_of(found)
            if names is not None and not set(self.parameters) <= set(names):
                raise PrivateNameError(self._complaint(f"it takes ({', '.join(names)}), not {self.parameters}"))
        return found

    def replace_on(self, instance: object, value: Any) -> None:
        """Set an attribute that `instance` already has.

        Raises:
            PrivateNameError: `instance` has no such attribute, so nothing would read the value.
        """
        last = self.name.rpartition(".")[2]
        if not hasattr(instance, last):
            raise PrivateNameError(self._complaint(f"{type(instance).__name__} has no attribute of that name"))
        setattr(instance, last, value)

    def _complaint(self, what: str) -> str:
        library = self.name.partition(".")[0]
        return (
            f"lightning_paral uses the private name {self.name} {self.purpose}, and in {library} {version(library)} "
            f"{what}. It was tested with {self.seen}: install one of these versions."
        )

    def error(self, what: str) -> PrivateNameError:
        """Return the error for a version in which the name has another meaning; `what` says how it differs."""
        return PrivateNameError(self._complaint(what))


def _parameters_of(function: Any) -> tuple[str, ...] | None:
    """Return the names of the parameters; `None` for wrappers that take any, and for functions that do not say."""
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
    """The module or class at a dotted path."""
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
    """Whether the code of a class, one of its bases, or a function names `attribute`."""
    return any(
        attribute in vars(base) or attribute in vars(base).get("__annotations__", {}) or attribute in _names_in(base)
        for base in getattr(owner, "__mro__", (owner,))
    )


@cache
def _names_in(owner: Any) -> frozenset[str]:
    """Return attributes, inner functions and strings in the code of a function, or of a class without its bases."""
    # Not by the source: to read it takes a hundred times longer, and comments and parameters name attributes, too.
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
    """Yield the code of a function and of those it replaces: other libraries wrap methods, not all by `wraps`."""
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
                with suppress(ValueError):  # it is empty
                    waiting.append(cell.cell_contents)
