"""The command line of both tables: run cells, print their outcomes, and write the page."""

import argparse
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tests.contract.user_code.outcomes import Outcome
from tests.rank_pool import RankPool

Cell = tuple[str, str]


def main(
    description: str | None,
    cells: list[Cell],
    outcome: Callable[[str, str, RankPool], Outcome],
    write: Callable[[dict[Cell, Outcome]], None],
) -> None:
    """Parse the arguments of the command line, and run the chosen cells.

    Args:
        description: the help text.
        cells: all cells, as labels of row and column.
        outcome: a function that runs the cell with the given labels.
        write: a function that writes the page of the table.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", default="")
    parser.add_argument("column", nargs="?", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--trace", action="store_true", help="print the traceback of errors")
    parser.add_argument("--log", type=Path, help="append outcomes to this file, and do not run the cells in it")
    args = parser.parse_args()
    chosen = [cell for cell in cells if re.search(args.row, cell[0]) and re.search(args.column, cell[1])]
    outcomes = read_log(args.log) if args.log else {}
    outcomes = {cell: outcomes[cell] for cell in chosen if cell in outcomes}
    started = time.monotonic()
    pool = RankPool()
    try:
        for cell in chosen:
            if cell in outcomes:
                continue
            before = time.monotonic()
            found = outcomes[cell] = outcome(*cell, pool)
            seconds = time.monotonic() - before
            print(f"{cell[1]:18} | {cell[0]:50} | {found.kind:8} | {seconds:5.2f} s | {found.reason}", flush=True)
            if args.trace:
                print(found.detail)
            if args.log:
                with args.log.open("a") as log:
                    log.write(json.dumps([*cell, asdict(found)]) + "\n")
    finally:
        pool.close()
    print(f"{len(outcomes)} cells in {time.monotonic() - started:.0f} s")
    if args.write:
        write(outcomes)


def read_log(path: Path) -> dict[Cell, Outcome]:
    """Return the last outcome of each cell in a log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row, column): Outcome(**found) for row, column, found in lines}
