"""The pages that are generated from the code, and how."""

import re
from collections.abc import Callable
from pathlib import Path

from tests.docs.commands import render_commands
from tests.docs.errors import render_errors
from tests.docs.options import render_options
from tests.docs.tree import render_layers, render_tree

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def render_architecture() -> str:
    """Return the page with its generated blocks anew; the text around them is written by hand."""
    text = (DOCS / "architecture.md").read_text()
    for name, block in (("layers", render_layers()), ("tree", render_tree())):
        pattern = rf"(<!-- begin: {name} -->\n).*?(<!-- end: {name} -->)"
        text, found = re.subn(pattern, lambda match, block=block: match[1] + block + match[2], text, flags=re.DOTALL)
        assert found == 1, name
    return text


PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "reference" / "options.md": render_options,
    DOCS / "reference" / "commands.md": render_commands,
    DOCS / "reference" / "errors.md": render_errors,
    DOCS / "architecture.md": render_architecture,
}
"""By path: what renders the page."""
