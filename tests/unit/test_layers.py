"""Imports only go down the list of layers."""

import ast
from pathlib import Path

import pytest

import lightning_paral

ROOT = Path(lightning_paral.__file__).parent
LAYERS = (
    "__main__",
    "cli",
    "__init__",
    "error_report",
    "registry",
    "other_trainers",
    "strategies",
    "engines",
    "averaging",
    "checkpoint",
    "data",
    "model",
    "comm",
    "distributed",
    "options",
    "option_types",
    "option_names",
    "compat",
    "tested_versions",
    "_version",
    "suggestions",
    "errors",
)
FILES = sorted(ROOT.rglob("*.py"))


def layer_of(module: str) -> int:
    """The layer of a module given by its dotted name below `lightning_paral`; the empty name is the package itself."""
    return LAYERS.index(module.split(".")[0] or "__init__")


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
    return {name.removeprefix("lightning_paral").lstrip(".") for name in modules if name.startswith("lightning_paral")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_down(path: Path) -> None:
    own = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")

    for imported in imported_modules(path):
        assert layer_of(imported) >= layer_of(own), f"{own} imports lightning_paral.{imported}, which lies above it"


@pytest.mark.parametrize("engine", sorted(path.parent.name for path in (ROOT / "engines").glob("*/__init__.py")))
def test_engines_do_not_import_each_other(engine: str) -> None:
    for path in (ROOT / "engines" / engine).rglob("*.py"):
        engines = {module.split(".")[1] for module in imported_modules(path) if module.startswith("engines.")}
        assert engines <= {engine}, f"{path.relative_to(ROOT)} imports another engine"


def test_files_hold_one_idea_each() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "helpers", "common")]
