"""Only `lightning_paral.compat` uses private names of the libraries, and only it patches them."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import TypeGuard

import pytest
import torch

from tests.source import PACKAGE, trees

LIBRARIES = {"torch", "lightning", "pytorch_lightning", "torchmetrics", "deepspeed"}
OF_PYTHON = {"_exit", "_inheriting", "_fields", "_asdict", "_replace", "_make", "_getframe", "_current_frames"}
# Set by transformers on its models. This package does not import transformers.
OF_TRANSFORMERS = {"_no_split_modules", "_tied_weights_keys", "_keys_to_ignore_on_save", "_is_hf_initialized"}
# Names in files, which do not depend on installed versions. Names with `_rebuild_` are among them.
IN_FILES = {"_reconstruct", "_core", "_growth_tracker", "_class_path"}
# Attributes of the libraries that our classes also have. Except on `self`, they count as attributes of the libraries.
OF_MODULES_AND_TENSORS = {"_parameters", "_buffers", "_modules", "_metadata", "_trainer", "_version", "_local_tensor"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_names() -> set[str]:
    """Return the private names of functions, classes, attributes and variables of this package."""
    names = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and on_self(node):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return {name for name in names if is_private(name)}


def on_self(node: ast.Attribute) -> bool:
    """Return whether this is `self.name`, `cls.name` or `super().name`."""
    value = node.value
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


OWN = own_names()


def imported_privately(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARIES:
            for alias in node.names:
                if any(map(is_private, [*node.module.split("."), alias.name])):
                    yield f"line {node.lineno}: from {node.module} import {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] in LIBRARIES and any(map(is_private, parts)):
                    yield f"line {node.lineno}: import {alias.name}"


def used_privately(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OF_PYTHON:
            ours = node.attr in OWN and (on_self(node) or node.attr not in OF_MODULES_AND_TENSORS)
            # Names of operators may begin with an underscore and be public. Only functions of torch are private.
            of_dispatcher = ast.unparse(node.value).endswith("aten")
            if not ours and not of_dispatcher:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_identifier(node.value):
            known = OWN | IN_FILES | OF_PYTHON | OF_TRANSFORMERS
            if is_private(node.value) and node.value not in known and not hasattr(torch.ops.aten, node.value):
                yield f"line {node.lineno}: {node.value!r}"


def is_identifier(text: str) -> bool:
    ours_or_in_files = text.startswith(("_rebuild_", "_lightning_paral_"))
    return text.isidentifier() and any(map(str.isalpha, text)) and not ours_or_in_files


def patched(tree: ast.Module) -> Iterator[str]:
    """Yield assignments to attributes of names imported from the libraries."""
    theirs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in LIBRARIES:
            theirs |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.split(".")[0] in LIBRARIES]
            theirs |= {(alias.asname or alias.name).split(".")[0] for alias in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            target: ast.expr = node
        elif is_call_of(node, "setattr", "delattr"):
            target = node.args[0]
        else:
            continue
        while isinstance(target, ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name) and target.id in theirs:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def is_call_of(node: ast.AST, *names: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


@pytest.mark.source
def test_no_private_name_of_a_library_is_used_or_patched() -> None:
    found = [
        f"{file}, {use}"
        for file, tree in trees().items()
        if not file.startswith("compat/")
        for uses in (imported_privately(tree), used_privately(tree), patched(tree))
        for use in uses
    ]

    assert not found, "\n".join(["these belong in lightning_paral/compat:", *found])


def test_no_class_overrides_a_private_method_of_a_library() -> None:
    found = []
    for info in pkgutil.walk_packages([str(PACKAGE)], "lightning_paral."):
        if info.name.startswith("lightning_paral.compat") or info.name.endswith("__main__"):
            continue
        for name, kind in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            if kind.__module__ != info.name:
                continue
            foreign = [base for base in kind.__mro__[1:] if base.__module__.split(".")[0] in LIBRARIES]
            theirs = {
                own
                for base in foreign
                for own in vars(base)
                if is_private(own) and not own.startswith("_abc_") and own != "_backward_cls"
            }
            found += [f"{info.name}.{name}.{own}" for own in vars(kind) if own in theirs]

    assert not found, "these belong in lightning_paral/compat:\n" + "\n".join(sorted(set(found)))
