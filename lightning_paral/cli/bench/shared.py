"""What the commands of `paral bench` share: reading lists of options, and showing progress and results."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import RenderableType

from lightning_paral.diagnostics.bench.machine import this_machine
from lightning_paral.diagnostics.bench.ranks import OnProgress
from lightning_paral.errors import ConfigurationError
from lightning_paral.plots import save_figure
from lightning_paral.quantities import parse_bytes
from lightning_paral.tables import make_console


def show(
    options: argparse.Namespace,
    command: str,
    record: dict[str, Any],
    table: RenderableType,
    plot: Callable[[], Any],
) -> None:
    """Print the results and draw the plot, as the options say."""
    machine = this_machine()
    if options.json:
        print(json.dumps({"benchmark": command, "machine": machine.as_json(), **record}, indent=2))
    else:
        console = make_console()
        console.print(table)
        console.print(f"[dim]{machine.describe()}[/]")
    if options.plot:
        save_figure(plot(), options.plot)


@contextmanager
def progress(options: argparse.Namespace) -> Iterator[OnProgress | None]:
    """Return a function that shows on the terminal what is being measured; `None` if there is no terminal."""
    console = make_console()
    if options.json or not console.is_terminal:
        yield None
        return
    with console.status("starting ranks") as status:
        yield status.update


def listed(text: str | None, option: str, default: Sequence[str]) -> list[str]:
    """Return the parts of a list with commas; `default` if the option is not given."""
    if text is None:
        return list(default)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigurationError(f"{option} names nothing. Give a list with commas.")
    return parts


def sizes(text: str | None, default: Sequence[int]) -> list[int]:
    """Return the numbers of `--sizes`, such as `64KiB,1M`; `default` if the option is not given."""
    return list(default) if text is None else [parse_bytes(part, "--sizes") for part in listed(text, "--sizes", ())]


def check_rounds(rounds: int) -> None:
    """Check that there is at least one round."""
    if rounds < 1:
        raise ConfigurationError(f"--rounds {rounds} is not a number of rounds. Give at least 1.")


def number(text: str, option: str) -> int:
    """Return a whole number that is not negative."""
    if not text.isdecimal():
        raise ConfigurationError(f"{option} {text!r} is not a whole number.")
    return int(text)
