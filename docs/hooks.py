"""Hooks of MkDocs: `mkdocs.yml` names this file."""

import re
from typing import Any

_TABLES = ("user-code.md", "lightning.md")
"""Pages that tests write, with code outside of backticks."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Escape brackets in tables and footnotes that would otherwise be taken for links."""
    if page.file.src_uri not in _TABLES:
        return markdown
    return "\n".join(_escaped(line) if re.match(r"\||\[\^", line) else line for line in markdown.split("\n"))


def _escaped(line: str) -> str:
    note, text = re.match(r"(\[\^\d+\]: )?(.*)", line, flags=re.DOTALL).groups()  # type: ignore[union-attr]
    parts = text.split("`")
    parts[::2] = [re.sub(r"\[(?!\^)", r"\\[", part) for part in parts[::2]]
    return (note or "") + "`".join(parts)
