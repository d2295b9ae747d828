"""Tables and JSON files, as the programs of the tests write them."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def markdown(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table of Markdown."""
    first, *others = (f"| {' | '.join(map(str, line))} |" for line in (headers, *rows))
    return "\n".join([first, "|---" * len(headers) + "|", *others])


def write_json(path: Path, content: Any) -> None:
    """Write `content` to `path` atomically."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")
    os.replace(draft, path)
