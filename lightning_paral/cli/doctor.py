"""`paral doctor`: what this machine has, which strategies are ready, and whether its ranks can communicate."""

import json
import os
import sys
from contextlib import redirect_stdout

from lightning_paral.cli.parser import CommandParser
from lightning_paral.diagnostics.doctor import as_json, broken, conclusion, examine
from lightning_paral.engines.zero.options import PATH_VARIABLE
from lightning_paral.tables import make_console


def doctor(arguments: list[str]) -> None:
    """Print versions, devices, operators, interfaces and ready strategies, and all-reduce over ranks started here.

    The exit status is 1 if something is broken.
    """
    parser = CommandParser(prog="paral doctor", description=doctor.__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks to start on this machine (default: 2)")
    path = os.environ.get(PATH_VARIABLE)
    parser.add_argument("--nvme-path", default=path, help=f"folder for offload to NVMe (default: {PATH_VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    console, facts = make_console(), []
    console.file = sys.stdout
    # Libraries print to stdout when they are imported, and the output has to stay readable JSON.
    with redirect_stdout(sys.stderr):
        for fact in examine(options.ranks, options.nvme_path):
            facts.append(fact)
            if not options.json:
                console.print(fact)
        if options.json:
            print(json.dumps(as_json(facts), indent=2), file=console.file)
        else:
            console.print(conclusion(facts))
    if broken(facts):
        sys.exit(1)
