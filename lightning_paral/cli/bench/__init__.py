"""`paral bench`: measure collectives, training steps, memory, checkpoints and optimizers, one module per benchmark."""

import argparse
import sys
from datetime import timedelta
from types import ModuleType

from lightning_paral.cli.bench import adam, checkpoint, comm, memory, step
from lightning_paral.diagnostics.bench.rank import rank_of_launcher
from lightning_paral.errors import ConfigurationError, RankFailedError
from lightning_paral.plots import check_plot_path

_DESCRIPTION = """\
Measure on this machine. Times are medians of rounds that take turns between what is compared.
A machine that does nothing else gives the best figures.
"""

_COMMANDS: dict[str, ModuleType] = {
    "comm": comm,
    "step": step,
    "memory": memory,
    "checkpoint": checkpoint,
    "adam": adam,
}
"""Modules with two functions: `add_options(parser)` and `run(options)`, whose docstring is the help.

If a module has `TAKES_OVERRIDES`, `options.overrides` has the options that its parser does not know.
"""


def bench(arguments: list[str]) -> None:
    """Measure collectives, training steps, memory, checkpoints and optimizers."""
    parser = argparse.ArgumentParser(
        prog="paral bench", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=module.run.__doc__, description=module.run.__doc__)
        module.add_options(command)
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
        command.add_argument("--plot", metavar="FILE", help="also draw the figures into FILE, such as bench.png")
        command.add_argument(
            "--timeout", type=float, default=30.0, metavar="MINUTES", help="give up after so long (default: 30)"
        )
    options, rest = parser.parse_known_args(arguments)
    options.overrides = rest
    if rest and not hasattr(_COMMANDS[options.command], "TAKES_OVERRIDES"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if not options.timeout > 0:
        raise ConfigurationError(f"--timeout {options.timeout} is not a number of minutes. Give a positive one.")
    if options.command != "comm" and rank_of_launcher(timedelta()) is not None:
        raise ConfigurationError(
            f"paral bench {options.command} starts its own ranks, but a launcher has started this process as a rank "
            "(RANK and WORLD_SIZE are set). Start it without torchrun, or unset them. Only `paral bench comm` uses the "
            "ranks of a launcher."
        )
    if options.plot:
        check_plot_path(options.plot)
    try:
        _COMMANDS[options.command].run(options)
    except RankFailedError as error:
        sys.exit(f"paral: {error}")
