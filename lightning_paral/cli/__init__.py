"""The command-line tool `paral`."""

import os
import pkgutil
import platform
import select
import signal
import sys
from importlib.metadata import version

from lightning_paral._version import __version__
from lightning_paral.distributed.failure import first_failure_of
from lightning_paral.error_report import has_user_cause
from lightning_paral.errors import CheckpointError, ConfigurationError
from lightning_paral.text import did_you_mean, nearest_names

TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
_COMMANDS = {
    "plan": ("plan:plan_command", "predict the costs of a fit under each strategy, and choose one"),
    "check": ("check:check_command", "compare a few steps under each strategy with one process"),
    "strategies": ("doctor:strategies", "list the strategies this package registers"),
    "consolidate": ("checkpoints:consolidate", "convert a checkpoint to one file, or a Hugging Face folder"),
    "verify": ("checkpoints:verify", "check that a checkpoint is complete and undamaged"),
    "inspect": ("checkpoints:inspect", "print the contents of a checkpoint"),
    "doctor": ("doctor:doctor", "print what this machine has, and test communication between ranks"),
}
"""The module and function of each command, and one line about it. Modules are imported when they are used."""


def main() -> None:
    """Run the command that the first argument names."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    is_trainer_command = command in TRAINER_COMMANDS
    try:
        _run(command)
    except (KeyboardInterrupt, BrokenPipeError) as error:
        # The traceback of a fit stays: it says why the training ended.
        if is_trainer_command or (isinstance(error, BrokenPipeError) and not _is_stdout_closed()):
            raise
        sys.exit(128 + (signal.SIGPIPE if isinstance(error, BrokenPipeError) else signal.SIGINT))  # as in shells
    except (ConfigurationError, CheckpointError) as error:
        if is_trainer_command and (has_user_cause(error) or first_failure_of(error) is not None):
            raise
        sys.exit(f"paral: {error}")
    finally:
        _flush_or_discard_stdout()


def _run(command: str) -> None:
    if command in ("-h", "--help"):
        _print_help()
    elif command == "--version":
        others = ", ".join(f"{name} {version(name)}" for name in ("lightning", "torch", "deepspeed"))
        print(f"lightning_paral {__version__} (Python {platform.python_version()}, {others})")
    elif command in TRAINER_COMMANDS:
        from lightning_paral.cli.train import AnyModelCLI

        AnyModelCLI(save_config_kwargs={"overwrite": True})
    elif command in _COMMANDS:
        function, _ = _COMMANDS[command]
        pkgutil.resolve_name(f"lightning_paral.cli.{function}")(sys.argv[2:])
    else:
        near = did_you_mean(nearest_names(command, (*TRAINER_COMMANDS, *_COMMANDS)))
        print(f"paral: There is no command {command!r}. {near or '`paral --help` lists all.'}", file=sys.stderr)
        sys.exit(2)


def _print_help() -> None:
    print("usage: paral COMMAND [options]\n")
    print("  fit, validate, test, predict\n               run Lightning's Trainer from YAML and options")
    for name, (_, about) in _COMMANDS.items():
        print(f"  {name:<11}  {about}")
    print("\n  --version    print the versions to include in a bug report")
    print("\n`paral COMMAND --help` lists the options of a command.")


def _is_stdout_closed() -> bool:
    """Return whether the reader of stdout has closed it, as in `| head`.

    SIGPIPE stays ignored, as https://docs.python.org/3/library/signal.html#note-on-sigpipe recommends: with its default
    action, a broken network connection would end the process as well.
    """
    poll = select.poll()
    poll.register(sys.stdout, 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))


def _flush_or_discard_stdout() -> None:
    """Flush stdout. If its reader has closed it, discard the output, so that Python reports no error at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


__all__ = ["TRAINER_COMMANDS", "main"]
