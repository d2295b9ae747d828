"""`paral strategies`: print a table of the strategies."""

from tabulate import tabulate

from lightning_paral.cli.parser import CommandParser
from lightning_paral.registry import STRATEGIES


def strategies(arguments: list[str]) -> None:
    """Print the name, class, arguments and description of every strategy that this package registers."""
    CommandParser(prog="paral strategies", description=strategies.__doc__).parse_args(arguments)
    rows = []
    for entry in STRATEGIES:
        given = ", ".join(f"{option}={value!r}" for option, value in entry.arguments.items())
        rows.append((entry.name, f"{entry.strategy.__name__}({given})", entry.description))
    print(tabulate(rows, headers=("name", "class", "what it does"), maxcolwidths=[None, 35, 41]))
