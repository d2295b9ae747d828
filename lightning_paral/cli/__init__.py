"""The command-line tool `paral`, with one module per subcommand."""

import sys

from lightning_paral.cli.closed_stdout import exiting_if_stdout_is_closed, flush_or_discard_stdout
from lightning_paral.cli.consolidate import consolidate
from lightning_paral.cli.inspect import inspect
from lightning_paral.cli.plan import plan_command
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
  plan                           predict memory, traffic and time of a fit for every strategy, and recommend one
  check                          train a few steps under each strategy, and compare them with one process
  strategies                     list the strategies this package registers
  consolidate                    convert a checkpoint to one Lightning file, safetensors or a Hugging Face folder
  verify                         check that a checkpoint is complete and undamaged
  inspect                        print the contents of a checkpoint
  doctor                         print what this machine has, what strategies lack, and test communication

  --version                      print the versions of this package, Python, Lightning, torch and DeepSpeed
"""


def _doctor(arguments: list[str]) -> None:
    from lightning_paral.cli.doctor import doctor  # imports much that other commands do not need

    doctor(arguments)


def _check(arguments: list[str]) -> None:
    from lightning_paral.cli.check import check_command  # imports much that other commands do not need

    check_command(arguments)


_COMMANDS = {
    "plan": plan_command,
    "check": _check,
    "strategies": print_strategies,
    "consolidate": consolidate,
    "verify": verify,
    "inspect": inspect,
    "doctor": _doctor,
}


def main() -> None:
    """Run the subcommand that the first argument names."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    try:
        if command in TRAINER_COMMANDS:
            _run_trainer_command()
        else:
            with exiting_if_stdout_is_closed():
                _run(command)
    except (ConfigurationError, CheckpointError) as error:
        if command in TRAINER_COMMANDS and has_user_cause(error):
            raise
        sys.exit(f"paral: {error}" if is_first_to_report(str(error)) else 1)


def _run(command: str) -> None:
    if command in ("-h", "--help"):
        print(_USAGE, end="")
    elif command == "--version":
        print_version()
    elif command in _COMMANDS:
        try:
            _COMMANDS[command](sys.argv[2:])
        except KeyboardInterrupt:
            sys.exit(130)  # as in shells: 128 + SIGINT
    else:
        sys.exit(f"paral: there is no command {command!r}.\n\n{_USAGE}")


def _run_trainer_command() -> None:
    try:
        run_trainer_command()
    finally:
        # If a fit fails because its output cannot be written, the traceback stays: it says why the training ended.
        flush_or_discard_stdout()


__all__ = ["main"]
