"""Run cells, print their outcomes, and write the page.

python -m tests.contract.user_code [ROW [COLUMN]]   the cells whose labels match the patterns
python -m tests.contract.user_code --write          all of them, then docs/user-code.md
"""

import tests.contract.user_code.themes  # noqa: F401  registers the rows
from tests.contract import command
from tests.contract.user_code import table
from tests.contract.user_code.outcomes import cells, outcome

if __name__ == "__main__":
    command.main(__doc__, cells(), outcome, table.write)
