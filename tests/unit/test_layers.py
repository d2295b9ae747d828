"""Imports only go down the list of layers."""

import ast
from collections.abc import Iterator

import pytest

from tests.source import trees

pytestmark = pytest.mark.source

LAYERS = (
    "__main__",
    "cli",
    "__init__",
    "diagnostics",
    "error_report",
    "registry",
    "strategies",
    "callbacks",
    "engines",
    "planning",
    "averaging",
    "checkpoint",
    "data",
    "model",
    "comm",
    "distributed",
    "options",
    "option_types",
    "compat",
    "tested_versions",
    "_version",
    "text",
    "errors",
)


def layer_of(module: str) -> int:
    """Return the layer of a module, given by its dotted name below `lightning_paral`. The empty name is the package."""
    return LAYERS.index(module.split(".")[0] or "__init__")


def imports() -> Iterator[tuple[str, str]]:
    """Yield the dotted names below `lightning_paral` of each module and of a module that it imports."""
    for file, tree in trees().items():
        importer = file.removesuffix(".py").replace("/", ".")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                names = [node.module or ""]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.startswith("lightning_paral"):
                    yield importer, name.removeprefix("lightning_paral").lstrip(".")


def test_imports_go_down() -> None:
    upward = [f"{own} imports {imported}" for own, imported in imports() if layer_of(imported) < layer_of(own)]

    assert not upward, "\n".join(["modules import from layers above them:", *upward])


def test_engines_do_not_import_each_other() -> None:
    engines = [(own, imported) for own, imported in imports() if own.startswith("engines.")]
    between = [
        f"{own} imports {imported}"
        for own, imported in engines
        if imported.startswith("engines.") and imported.split(".")[1] != own.split(".")[1]
    ]

    assert not between, "\n".join(["engines import another engine:", *between])


def test_files_hold_one_idea_each() -> None:
    assert not [file for file in trees() if file.endswith(("utils.py", "helpers.py", "common.py"))]
