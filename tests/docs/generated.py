"""The generated parts of the documentation, and the functions that render them."""

import re
from collections.abc import Callable
from pathlib import Path

from tests.docs.charts import Plot
from tests.docs.claims import blocks_of_claims
from tests.docs.commands import render_commands
from tests.docs.errors import render_errors
from tests.docs.options import render_options
from tests.docs.readme import README, render_readme
from tests.docs.results_pages import blocks_of_correctness, blocks_of_measurements, correctness_plot, measured_plot
from tests.docs.tree import blocks_of_architecture

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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


def _example() -> str:
    path = ROOT / "examples" / "flat_all_reduce.py"
    return f'```python title="{path.name}"\n{path.read_text()}```'


PAGES: dict[Path, Callable[[], str]] = {
    README: render_readme,
    DOCS / "reference" / "options.md": render_options,
    DOCS / "reference" / "commands.md": render_commands,
    DOCS / "reference" / "errors.md": render_errors,
    DOCS / "architecture.md": lambda: filled(DOCS / "architecture.md", blocks_of_architecture()),
    DOCS / "guides" / "own-strategy.md": lambda: filled(DOCS / "guides" / "own-strategy.md", {"example": _example()}),
    DOCS / "correctness.md": lambda: filled(DOCS / "correctness.md", blocks_of_correctness()),
    DOCS / "claims.md": lambda: filled(DOCS / "claims.md", blocks_of_claims()),
    DOCS / "measurements.md": lambda: filled(DOCS / "measurements.md", blocks_of_measurements()),
}
"""The function that renders each file."""
PLOTS: dict[Path, Callable[[], Plot]] = {
    DOCS / "assets" / "correctness.svg": correctness_plot,
    DOCS / "assets" / "measured.svg": measured_plot,
}
"""The function that creates each plot. Only drawing it needs matplotlib."""


def stale_files(*, redraw: bool = False) -> dict[Path, Callable[[], str]]:
    """Return the functions that render the files that are not up to date.

    Args:
        redraw: whether to include all plots, even those whose data have not changed.
    """
    plots = {path: make() for path, make in PLOTS.items()}
    pages = {path: render for path, render in PAGES.items() if not path.exists() or path.read_text() != render()}
    return pages | {path: plot.render for path, plot in plots.items() if redraw or not plot.is_up_to_date(path)}


def write_all() -> None:
    """Write the files that are not up to date: pages first, since plots need matplotlib."""
    for path, render in stale_files().items():
        path.write_text(render())
