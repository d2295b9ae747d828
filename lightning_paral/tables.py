"""Tables for the terminal, made with rich."""

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def make_console() -> Console:
    """Return a console for stdout, with colour where the terminal has it; 120 columns wide if it is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def make_table(
    headers: Iterable[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,), is_narrow: bool = False
) -> Table:
    """Return a table.

    Args:
        headers: the titles of the columns.
        rows: the cells of each row, as many as there are headers; they may have rich's markup.
        left: numbers of the columns that are aligned to the left. The others hold numbers.
        is_narrow: separate columns by one space instead of two, and do not fold text.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if is_narrow else 1, 0, 0), header_style="bold")
    for number, header in enumerate(headers):
        is_text = number in left
        table.add_column(
            header, justify="left" if is_text else "right", no_wrap=is_narrow or not is_text, overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    return table
