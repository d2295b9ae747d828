"""The command line of a table: run cells, print their outcomes, and write the page."""

import argparse
import re
import time

from lightning_paral.diagnostics.rank_pool import RankPool
from tests.contract.tables import page
from tests.contract.tables.lanes import Cell
from tests.contract.tables.outcomes import outcome
from tests.contract.tables.table import Outcome, Table


def main(table: Table) -> None:
    """Parse the arguments of the command line, and run the chosen cells."""
    parser = argparse.ArgumentParser(prog=f"python -m {table.package}")
    parser.add_argument("row", nargs="?", default="", help="a pattern of the labels of the rows to run")
    parser.add_argument("column", nargs="?", default="", help="a pattern of the labels of the columns to run")
    parser.add_argument("--only-new", action="store_true", help="run only cells that the page does not have")
    parser.add_argument(
        "--write", action="store_true", help=f"write docs/{table.page.name}; other cells stay as they are"
    )
    parser.add_argument("--trace", action="store_true", help="print the traceback of errors")
    args = parser.parse_args()
    known = page.read(table)
    chosen = [cell for cell in table.cells() if re.search(args.row, cell[0]) and re.search(args.column, cell[1])]
    chosen = [cell for cell in chosen if not (args.only_new and cell in known)]
    found: dict[Cell, Outcome] = {}
    started = time.monotonic()
    pool = RankPool()
    try:
        for cell in chosen:
            before = time.monotonic()
            each = found[cell] = outcome(table, *cell, pool)
            seconds = time.monotonic() - before
            print(f"{cell[1]:18} | {cell[0]:50} | {each.kind:8} | {seconds:5.2f} s | {each.reason}", flush=True)
            if args.trace:
                print(each.detail)
    finally:
        pool.close()
        if args.write:
            page.write(table, known | found)
    print(f"{len(found)} cells in {time.monotonic() - started:.0f} s")
