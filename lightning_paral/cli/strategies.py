"""`paral strategies`: print a table of the strategies."""

import argparse
from collections.abc import Mapping

from tabulate import tabulate

from lightning_paral.registry import STRATEGIES


def print_strategies(arguments: list[str]) -> None:
    """Print the name, class, arguments and description of every strategy that this package registers."""
    argparse.ArgumentParser(prog="paral strategies", description=print_strategies.__doc__).parse_args(arguments)
    rows = [
        (entry.name, f"{entry.strategy.__name__}({_format_arguments(entry.arguments)})", entry.description)
        for entry in STRATEGIES
    ]
    print(tabulate(rows, headers=("name", "class", "what it does"), maxcolwidths=[None, 35, 41]))


def _format_arguments(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{option}={value!r}" for option, value in arguments.items())
