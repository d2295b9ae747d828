"""The generated parts of the documentation, and the functions that render them."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import lightning_paral
from tests.docs.charts import Plot
from tests.docs.claims import blocks_of_claims
from tests.docs.commands import render_commands
from tests.docs.errors import render_errors
from tests.docs.options import render_options
from tests.docs.results import (
    README,
    blocks_of_correctness,
    blocks_of_measurements,
    correctness_plot,
    measured_plot,
    render_readme,
)
from tests.tables import markdown
from tests.unit.test_layers import LAYERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = Path(lightning_paral.__file__).parent


def filled(path: Path, blocks: dict[str, str]) -> str:
    """Return a page with new text between `<!-- begin: NAME -->` and `<!-- end: NAME -->`.

    The text around the blocks is written by hand.
    """
    text = path.read_text()
    places = re.findall(r"<!-- begin: (\S+) -->", text)
    assert sorted(places) == sorted(blocks), f"{path.name}: blocks of {sorted(places)}, generated {sorted(blocks)}"
    for name, block in blocks.items():
        pattern = rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)"
        shown = f"\n{block}\n\n"
        text = re.sub(pattern, lambda match, shown=shown: match[1] + shown + match[2], text, flags=re.DOTALL)  # type: ignore[misc]
    return text


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
    "correctness.md": blocks_of_correctness,
    "claims.md": blocks_of_claims,
    "measurements.md": blocks_of_measurements,
}
"""For each page with generated blocks, the function that returns them."""
PAGES: dict[Path, Callable[[], str]] = {
    README: render_readme,
    DOCS / "reference" / "options.md": render_options,
    DOCS / "reference" / "commands.md": render_commands,
    DOCS / "reference" / "errors.md": render_errors,
    **{DOCS / page: lambda page=page, make=make: filled(DOCS / page, make()) for page, make in BLOCKS.items()},
}
"""The function that renders each file."""
PLOTS: dict[Path, Callable[[], Plot]] = {
    DOCS / "assets" / "correctness.svg": correctness_plot,
    DOCS / "assets" / "measured.svg": measured_plot,
}
"""The function that creates each plot. Only drawing it needs matplotlib."""


def stale_files() -> dict[Path, Callable[[], str]]:
    """Return the functions that render the files that are not up to date."""
    pages = {path: render for path, render in PAGES.items() if not path.exists() or path.read_text() != render()}
    plots = {path: make() for path, make in PLOTS.items()}
    return pages | {path: plot.render for path, plot in plots.items() if not plot.is_up_to_date(path)}


def write_all() -> None:
    """Write the files that are not up to date: pages first, since plots need matplotlib."""
    for path, render in stale_files().items():
        path.write_text(render())
        print("written", path.relative_to(ROOT))
