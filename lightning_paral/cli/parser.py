"""What commands share: parsers with short errors, which name what an unknown option resembles, and the output."""

import argparse
import inspect
import json
import pkgutil
import re
import textwrap
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from lightning_paral.errors import ConfigurationError
from lightning_paral.registry import STRATEGIES
from lightning_paral.text import did_you_mean, make_console, nearest_names

_UNKNOWN = re.compile(r"(?:[Oo]ption|attribute) '([\w.]+)'|arguments: -*([\w.-]+)")
_NAMED = re.compile(r"Expected a dot import path string: (paral_\w+)")
_OWNER = re.compile(r"(?:given class_path|module) '([\w.]+)'")
_NOISE = re.compile(
    r"[\s-]*(Does not validate against any|Subtypes:|Errors:|Given value type:|"
    r"Expected a <class 'NoneType'>|Subclass types expect|a class path \(str\)|a dict with)"
)
"""Lines in which jsonargparse describes what it tried."""
_MAX_LINES, _MAX_WIDTH = 8, 130


class CommandParser(argparse.ArgumentParser):
    """The parser of a command that LightningCLI does not run."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with status 2."""
        _exit(self, message)

    def parse_beside_fit(self, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options of the command, and the arguments of `paral fit`; refuse what resembles the former."""
        options, rest = self.parse_known_args(arguments)
        if not rest:
            self.error("give a configuration, for example --config configs/gpt.yaml")
        known = re.findall(r"--[\w-]+", self.format_help())
        for each in rest:
            name = each.partition("=")[0]
            is_of_fit = not name.startswith("--") or "." in name or name in known
            if not is_of_fit and nearest_names(name, known, 1, 0.85):
                self.error(f"unrecognized arguments: {name}")
        return options, rest


class TrainerParser(LightningArgumentParser):
    """The parser of LightningCLI."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong, and exit with status 2, or raise if `exit_on_error` is off."""
        if not self.exit_on_error:
            super().error(message, ex)
        _exit(getattr(ex, "subcommand_parser", None) or self, message)


def _exit(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    lines = [line for line in message.splitlines() if line and not _NOISE.match(line)]
    given = [line for line in lines if line.strip().startswith("Given value:")]  # the innermost first
    lines = [line for line in lines[:_MAX_LINES] if line not in given[1:]]
    shown = [textwrap.shorten(line, _MAX_WIDTH, initial_indent=line[: -len(line.lstrip())]) for line in lines]
    hint = _hint(message, re.findall(r"--([\w.-]+)", parser.format_help()))
    command = parser.prog.replace(" [options]", "")
    text = "\n".join([*shown, *filter(None, [hint]), f"`{command} --help` lists all options."])
    parser.exit(2, f"paral: {text}\n")


def _hint(message: str, options: list[str]) -> str:
    """Return what to write instead of the unknown name in an error message; an empty string if nothing is similar.

    Args:
        message: the message of argparse or jsonargparse.
        options: the options of the parser.
    """
    if "is abstract" in message:
        return "The options of a class belong under init_args."
    if named := _NAMED.search(message):
        found = next((each for each in STRATEGIES if each.name == named[1]), None)
        if found is not None:
            return f"A name takes no options. Give the class: --trainer.strategy lightning_paral.{found.class_name}."
    unknown = _UNKNOWN.search(message)
    if unknown is None:
        return ""
    name = unknown[1] or unknown[2]
    known = {part for option in options for part in option.split(".")}
    if owners := _OWNER.findall(message[: unknown.start()]):
        owner: Any = pkgutil.resolve_name(owners[-1])  # a class, or the module that should have it
        known = set(inspect.signature(owner).parameters if isinstance(owner, type) else dir(owner))
        if getattr(owner, "__module__", "").startswith("lightning_paral."):
            try:
                owner(**{name: None})
            except ConfigurationError as error:  # knows options of other strategies as well
                return str(error)
    wrong = [part for part in name.split(".") if part not in known]
    return did_you_mean(nearest_names(wrong[0], known, 2, 0.6)) if wrong else ""


def show(report: Any, as_json: bool) -> None:
    """Print a report, which rich renders, or the JSON of its `as_dict`."""
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        make_console().print(report)
