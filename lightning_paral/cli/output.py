"""What commands print: a report as a table or as JSON, and a status line while they work."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.console import Console

from lightning_paral.tables import make_console


@contextmanager
def at_work(command: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr that a command works, and what it does, with the function that this yields.

    Libraries print to stdout when they are imported. It becomes stderr here, so that JSON stays readable.
    """
    with redirect_stdout(sys.stderr), Console(stderr=True).status(command) as status:
        yield lambda what: status.update(f"{command}: {what}")


def show(report: Any, as_json: bool) -> None:
    """Print a report, which rich renders, or the JSON of its `as_dict`."""
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        make_console().print(report)
