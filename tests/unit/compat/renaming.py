"""Simulate a version of a library in which an attribute of a class has a different name."""

import inspect
from types import CodeType, FunctionType
from typing import Any

import pytest

from lightning_paral.compat import private_name


def rename(kind: Any, attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rename `attribute` in the code of the class `kind`, until the test ends."""
    # Clear the cache of names found for the class.
    monkeypatch.setattr(private_name, "_names_in", private_name._names_in.__wrapped__)
    monkeypatch.delitem(vars(kind).get("__annotations__", {}), attribute, raising=False)
    for member in vars(kind).values():
        for function in (member.fget, member.fset) if isinstance(member, property) else (member,):
            inner = inspect.unwrap(function) if callable(function) else None
            if isinstance(inner, FunctionType):
                monkeypatch.setattr(inner, "__code__", _renamed(inner.__code__, attribute))


def _renamed(code: CodeType, attribute: str) -> CodeType:
    constants = [_renamed(each, attribute) if isinstance(each, CodeType) else each for each in code.co_consts]
    names = [f"{name}_new" if name == attribute else name for name in code.co_names]
    return code.replace(co_names=tuple(names), co_consts=tuple(constants))
