"""Run cells and print how they come out; write the table, and what is known to be open.

python -m tests.contract.user_code [ROW [COLUMN]]   those whose labels match the patterns
python -m tests.contract.user_code --write          all of them, then docs/user-code.md and known.py
"""

import re
import sys
import time

import tests.contract.user_code.themes  # noqa: F401  registers the rows
from tests.contract.user_code import known, table
from tests.contract.user_code.outcomes import Outcome, cells, outcome
from tests.rank_pool import RankPool


def main(row: str = "", column: str = "") -> None:
    writing = row == "--write"
    pool = RankPool()
    outcomes: dict[tuple[str, str], Outcome] = {}
    started = time.monotonic()
    try:
        for label, in_column in cells():
            if writing or (re.search(row, label) and re.search(column, in_column)):
                before = time.monotonic()
                found = outcomes[label, in_column] = outcome(label, in_column, pool)
                seconds = time.monotonic() - before
                print(f"{in_column:18} | {label:50} | {found.kind:8} | {seconds:5.2f} s | {found.reason}", flush=True)
                if not writing and found.detail:
                    print(found.detail)
    finally:
        pool.close()
    if writing:
        table.write(outcomes)
        known.write({cell: found for cell, found in outcomes.items() if found.kind not in ("equal", "refused")})
    print(f"{len(outcomes)} cells in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
