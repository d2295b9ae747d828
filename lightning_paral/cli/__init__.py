"""The command `paral`: one module per command."""

import sys

from lightning_paral.cli.strategies import print_strategies
from lightning_paral.cli.train import TRAINER_COMMANDS, run_trainer_command
from lightning_paral.errors import ConfigurationError

_USAGE = """\
usage: paral COMMAND [options]

  fit, validate, test, predict   run Lightning's Trainer from YAML and options (`paral fit --help`)
  strategies                     list the strategies this package registers
"""


def main() -> None:
    """Entry point: dispatch on the first word of the command line."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    try:
        if command == "strategies":
            print_strategies(sys.argv[2:])
        elif command in ("-h", "--help"):
            print(_USAGE, end="")
        elif command in TRAINER_COMMANDS:
            run_trainer_command()
        else:
            sys.exit(f"paral: there is no command {command!r}.\n\n{_USAGE}")
    except ConfigurationError as error:
        sys.exit(f"paral: {error}")


__all__ = ["main"]
