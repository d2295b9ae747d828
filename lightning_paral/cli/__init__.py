"""The command `paral`: one module per command."""

import sys

from lightning_paral.cli.consolidate import consolidate
from lightning_paral.cli.inspect import inspect
from lightning_paral.cli.strategies import print_strategies
from lightning_paral.cli.train import TRAINER_COMMANDS, run_trainer_command
from lightning_paral.cli.verify import verify
from lightning_paral.cli.version import print_version
from lightning_paral.distributed.process_group import is_first_to_report
from lightning_paral.error_report import has_user_cause
from lightning_paral.errors import CheckpointError, ConfigurationError

_USAGE = """\
usage: paral COMMAND [options]

  fit, validate, test, predict   run Lightning's Trainer from YAML and options (`paral fit --help`)
  strategies                     list the strategies this package registers
  consolidate                    convert a checkpoint to one Lightning file, safetensors or a Hugging Face folder
  verify                         check that a checkpoint is complete and undamaged
  inspect                        print the contents of a checkpoint

  --version                      print the versions of this package, Python, Lightning, torch and DeepSpeed
"""

_COMMANDS = {
    "strategies": print_strategies,
    "consolidate": consolidate,
    "verify": verify,
    "inspect": inspect,
}


def main() -> None:
    """Run the subcommand that the first argument names."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    try:
        if command in _COMMANDS:
            _run(command)
        elif command in ("-h", "--help"):
            print(_USAGE, end="")
        elif command == "--version":
            print_version()
        elif command in TRAINER_COMMANDS:
            run_trainer_command()
        else:
            sys.exit(f"paral: there is no command {command!r}.\n\n{_USAGE}")
    except (ConfigurationError, CheckpointError) as error:
        if command in TRAINER_COMMANDS and has_user_cause(error):
            raise
        sys.exit(f"paral: {error}" if is_first_to_report(str(error)) else 1)


def _run(command: str) -> None:
    try:
        _COMMANDS[command](sys.argv[2:])
    except KeyboardInterrupt:
        sys.exit(130)  # as in shells: 128 + SIGINT


__all__ = ["main"]
