"""Run cells, print their outcomes, and write docs/lightning.md: `python -m tests.contract.lightning_api --help`."""

from tests.contract.lightning_api.table import TABLE
from tests.contract.tables.command import main

if __name__ == "__main__":
    main(TABLE)
