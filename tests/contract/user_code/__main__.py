"""Run cells by pattern and print how they come out: `python -m tests.contract.user_code [ROW [COLUMN]]`."""

import re
import sys
import time

import tests.contract.user_code.themes  # noqa: F401
from tests.contract.user_code.outcomes import cells, outcome
from tests.rank_pool import RankPool


def main(row: str = "", column: str = "") -> None:
    pool = RankPool()
    try:
        for label, in_column in cells():
            if re.search(row, label) and re.search(column, in_column):
                started = time.monotonic()
                found = outcome(label, in_column, pool)
                seconds = time.monotonic() - started
                print(f"{in_column:18} | {label:50} | {found.kind:8} | {seconds:5.2f} s | {found.reason[:600]}", flush=True)
    finally:
        pool.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
