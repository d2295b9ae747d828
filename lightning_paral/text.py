"""Text that users read and write: names close to a misspelt one, sizes and durations, and tables for the terminal."""

import difflib
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from lightning_paral.errors import ConfigurationError

if TYPE_CHECKING:  # `import lightning_paral` does not load it
    from rich.console import Console
    from rich.table import Table

_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[kmgt]?)(?P<binary>i?)b?\s*", re.IGNORECASE)


def nearest_names(name: str, known: Collection[str], most: int = 3, cutoff: float = 0.7) -> list[str]:
    """Return up to `most` of the `known` names that resemble `name`, the most similar first.

    Args:
        name: the name that the user wrote.
        known: the names to choose from.
        most: the largest number of names to return.
        cutoff: the smallest similarity, from 0 to 1, as in `difflib.SequenceMatcher.ratio`.
    """
    return difflib.get_close_matches(name, sorted(known), n=most, cutoff=cutoff)


def did_you_mean(names: Sequence[str], *, quoted: bool = False) -> str:
    """Return the question "Did you mean ...?" with `names`; an empty string if there are none."""
    shown = map(repr, names) if quoted else names
    return f"Did you mean {' or '.join(shown)}?" if names else ""


def list_names(title: str, names: Sequence[str]) -> str:
    """Return the sentence `title: names. ` with at most 12 of the names, or an empty string if there are no names."""
    if not names:
        return ""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"{title}: {', '.join(names[:12])}{more}. "


def parse_bytes(text: str | int | float, name: str) -> int:
    """Return a size in bytes.

    Args:
        text: a number of bytes, or text such as `80GiB` (binary), `500MB` (decimal) or `64k`.
        name: what the size is for, at the beginning of an error, for example `--device-memory`.

    Raises:
        ConfigurationError: the text is not a size, or the size is not positive.
    """
    match = _SIZE.fullmatch(str(text))
    size = 0
    if match and (match["unit"] or not match["binary"]):
        factor = (1024 if match["binary"] else 1000) ** " kmgt".index(match["unit"].lower() or " ")
        size = int(float(match["number"]) * factor)
    if size < 1:
        raise ConfigurationError(f"{name} {text!r} is not a size. Give a size such as 80GiB, 500MB or 64KiB.")
    return size


def format_bytes(size: float) -> str:
    """Return a size in bytes as text with a binary unit, for example `31.4 GiB`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    digits = 0 if units[0] == "B" else 2 if abs(size) < 10 else 1 if abs(size) < 100 else 0
    return f"{size:.{digits}f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text with three digits, for example `12.3 ms`."""
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    value = seconds * factor
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def make_console() -> "Console":
    """Return a console for stdout, with colour where the terminal has it; 120 columns wide if it is no terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def make_table(
    headers: Iterable[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,), is_narrow: bool = False
) -> "Table":
    """Return a table.

    Args:
        headers: the titles of the columns.
        rows: the cells of each row, as many as there are headers; they may have rich's markup.
        left: numbers of the columns that are aligned to the left. The others hold numbers.
        is_narrow: separate columns by one space instead of two, and do not fold text.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if is_narrow else 1, 0, 0), header_style="bold")
    for number, header in enumerate(headers):
        is_text = number in left
        table.add_column(
            header, justify="left" if is_text else "right", no_wrap=is_narrow or not is_text, overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    return table
