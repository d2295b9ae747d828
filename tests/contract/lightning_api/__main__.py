"""Run cells, print their outcomes, and write the page.

python -m tests.contract.lightning_api [ROW [COLUMN]]   the cells whose labels match the patterns
python -m tests.contract.lightning_api --write          all of them, then docs/lightning.md
"""

from tests.contract import command
from tests.contract.lightning_api import table
from tests.contract.lightning_api.outcomes import cells, outcome

if __name__ == "__main__":
    command.main(__doc__, cells(), outcome, table.write)
