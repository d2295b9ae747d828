"""`paral doctor` and `paral strategies`: which strategies there are, and which are ready on this machine."""

import json
import os
import sys
from contextlib import redirect_stdout

from tabulate import tabulate

from lightning_paral.cli.parser import CommandParser
from lightning_paral.diagnostics.doctor import as_json, broken, conclusion, examine
from lightning_paral.engines.zero.options import PATH_VARIABLE
from lightning_paral.errors import ConfigurationError
from lightning_paral.registry import STRATEGIES


def doctor(arguments: list[str]) -> None:
    """Print versions, devices, operators and ready strategies, and all-reduce over ranks started here.

    The exit status is 1 if something is broken.
    """
    parser = CommandParser(prog="paral doctor", description=doctor.__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks to start on this machine (default: 2)")
    path = os.environ.get(PATH_VARIABLE)
    parser.add_argument("--nvme-path", default=path, help=f"folder for offload to NVMe (default: {PATH_VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        raise ConfigurationError(f"--ranks {options.ranks} was given. Give at least 1.")
    output, facts = sys.stdout, []
    # Libraries print to stdout when they are imported, and the output has to stay readable JSON.
    with redirect_stdout(sys.stderr):
        for fact in examine(options.ranks, options.nvme_path):
            facts.append(fact)
            if not options.json:
                print(fact, file=output, flush=True)
    print(json.dumps(as_json(facts), indent=2) if options.json else conclusion(facts))
    if broken(facts):
        sys.exit(1)


def strategies(arguments: list[str]) -> None:
    """Print the name, class, arguments and description of every strategy that this package registers."""
    CommandParser(prog="paral strategies", description=strategies.__doc__).parse_args(arguments)
    rows = []
    for entry in STRATEGIES:
        given = ", ".join(f"{option}={value!r}" for option, value in entry.arguments.items())
        rows.append((entry.name, f"{entry.strategy.__name__}({given})", entry.description))
    print(tabulate(rows, headers=("name", "class", "what it does"), maxcolwidths=[None, 35, 41]))
