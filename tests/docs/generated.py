"""The generated parts of the documentation, and the functions that render them."""

import ast
from collections.abc import Callable
from pathlib import Path

import lightning_paral
from tests.docs.blocks import filled
from tests.docs.commands import render_commands
from tests.docs.options import render_options
from tests.tables import markdown
from tests.unit.test_layers import LAYERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = Path(lightning_paral.__file__).parent


def _example() -> dict[str, str]:
    path = ROOT / "examples" / "flat_all_reduce.py"
    return {"example": f'```python title="{path.name}"\n{path.read_text()}```'}


def _summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.split("\n\n")[0].replace("\n", " ").removesuffix(".")


def _architecture() -> dict[str, str]:
    """Return the layers and the folders of the package, with the first sentence of their docstrings."""
    layers, folders = [], []
    for layer in LAYERS:
        is_folder = (PACKAGE / layer).is_dir()
        path = PACKAGE / (f"{layer}/__init__.py" if is_folder else f"{layer}.py")
        layers.append((f"`{layer}/`" if is_folder else f"`{layer}.py`", _summary(path)))
    for path in sorted(PACKAGE.rglob("__init__.py")):
        name = path.parent.relative_to(ROOT).as_posix()
        folders.append((f"`{name}/`", len(list(path.parent.glob("*.py"))) - 1, _summary(path)))
    return {
        "layers": markdown(("layer", "what it is"), layers),
        "tree": markdown(("folder", "modules", "what it is"), folders),
    }


BLOCKS: dict[str, Callable[[], dict[str, str]]] = {
    "architecture.md": _architecture,
    "guides/own-strategy.md": _example,
}
"""For each page with generated blocks, the function that returns them."""
PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "options.md": render_options,
    DOCS / "reference" / "commands.md": render_commands,
    **{DOCS / page: lambda page=page, make=make: filled(DOCS / page, make()) for page, make in BLOCKS.items()},
}
"""The function that renders each file."""


def stale_files() -> dict[Path, Callable[[], str]]:
    """Return the functions that render the files that are not up to date."""
    return {path: render for path, render in PAGES.items() if not path.exists() or path.read_text() != render()}


def write_all() -> None:
    """Write the files that are not up to date."""
    for path, render in stale_files().items():
        path.write_text(render())
        print("written", path.relative_to(ROOT))
