"""docs/reference/commands.md: the output of `paral --help` and of `--help` for each command."""

import io
import os
import sys
from contextlib import redirect_stdout, suppress
from unittest.mock import patch

from lightning_paral import STRATEGIES
from lightning_paral.cli import TRAINER_COMMANDS, main
from tests.tables import markdown

COMMANDS = ("strategies", "consolidate", "verify", "inspect", "plan", "check", "doctor")
INTRODUCTION = """\
# Commands

`paral` is installed with the package. `python -m lightning_paral` is the same command, for launchers such as torchrun.

<!-- Generated from the code by `python -m tests.docs --write`. -->
"""
TRAINER_COMMANDS_SECTION = """\
## paral fit, validate, test, predict

These are a LightningCLI for any `LightningModule` and `LightningDataModule`: `--model`, `--data`, `--trainer` and their
options, `--config FILE` any number of times, `--print_config`, `--ckpt_path`, `--seed_everything`. Modules in the
current folder can be named in a `class_path`. `paral fit --help` lists all options. See
[YAML and the command line](../guides/command-line.md).

`paral fit --resume auto` continues from the newest sound checkpoint in the folder of `ModelCheckpoint`, and
`--resume PATH` from a checkpoint, or from the newest one in another folder: see
[Restart and resume](../guides/failures.md#restart-and-resume).
"""
STATUS = """\
## Exit status

| status | meaning |
|---|---|
| 0 | success |
| 1 | an error, which is printed on standard error |
| 2 | wrong arguments |
| 130 | interrupted by Ctrl-C |
"""


def render_commands() -> str:
    """Return the page."""
    assert set(TRAINER_COMMANDS) == {"fit", "validate", "test", "predict"}
    parts = [INTRODUCTION, _block(printed_by("--help")), TRAINER_COMMANDS_SECTION]
    for command in COMMANDS:
        parts += [f"## paral {command}\n", _block(printed_by(*command.split(), "--help"))]
        if command == "strategies":
            rows = [(f"`{entry.name}`", entry.description) for entry in STRATEGIES]
            names = markdown(("name", "what it does"), rows)
            parts += ["It prints these names, with the class and the arguments of each:\n", f"{names}\n"]
    return "\n".join([*parts, STATUS])


def printed_by(*arguments: str) -> str:
    """Return the output of `paral` with these arguments, 80 columns wide."""
    printed = io.StringIO()
    with (
        patch.object(sys, "argv", ["paral", *arguments]),
        patch.dict(os.environ, {"COLUMNS": "80", "NO_COLOR": "1"}),
        redirect_stdout(printed),
        suppress(SystemExit),
    ):
        main()
    return printed.getvalue()


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"
