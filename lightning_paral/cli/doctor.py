"""`paral doctor`: what this machine has, which strategies are ready, and whether its ranks can communicate."""

import os
import sys

from lightning_paral.cli.output import at_work, show
from lightning_paral.cli.parser import CommandParser
from lightning_paral.diagnostics.doctor import examine
from lightning_paral.engines.zero.options import PATH_VARIABLE


def doctor(arguments: list[str]) -> None:
    """Print versions, devices, network, compiler, disk and ready strategies, and all-reduce over ranks started here.

    The exit status is 1 if something is broken.
    """
    parser = CommandParser(prog="paral doctor", description=doctor.__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks to start on this machine (default: 2)")
    path = os.environ.get(PATH_VARIABLE)
    parser.add_argument("--nvme-path", default=path, help=f"folder for offload to NVMe (default: {PATH_VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    with at_work("paral doctor") as progress:
        report = examine(options.ranks, options.nvme_path, progress)
    show(report, options.json)
    if report.broken:
        sys.exit(1)
