"""Run cells, print their outcomes, and write docs/user-code.md: `python -m tests.contract.user_code --help`."""

from tests.contract.tables.command import main
from tests.contract.user_code.table import TABLE

if __name__ == "__main__":
    main(TABLE)
