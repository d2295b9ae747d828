"""The layers and the folders of the package, with the first sentence of their docstrings."""

import ast
from pathlib import Path

import lightning_paral
from tests.unit.test_layers import LAYERS

ROOT = Path(lightning_paral.__file__).parent


def summary_of(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = docstring.split("\n\n")[0].replace("\n", " ")
    return first.removesuffix(".")


def blocks_of_architecture() -> dict[str, str]:
    """Return the generated blocks of docs/architecture.md, by name."""
    return {"layers": _layers(), "tree": _tree()}


def _layers() -> str:
    rows = ["| layer | what it is |", "|---|---|"]
    for layer in LAYERS:
        folder = ROOT / layer
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        shown = f"{layer}/" if folder.is_dir() else f"{layer}.py"
        rows.append(f"| `{shown}` | {summary_of(path)} |")
    return "\n".join(rows)


def _tree() -> str:
    rows = ["| folder | modules | what it is |", "|---|---|---|"]
    for path in sorted(ROOT.rglob("__init__.py")):
        folder = path.parent
        num_modules = len(list(folder.glob("*.py"))) - 1
        name = folder.relative_to(ROOT.parent).as_posix()
        rows.append(f"| `{name}/` | {num_modules} | {summary_of(path)} |")
    return "\n".join(rows)
