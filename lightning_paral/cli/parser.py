"""Short error messages for the command line: which option, what was given, what to do."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from lightning_paral.errors import ConfigurationError
from lightning_paral.suggestions import did_you_mean, nearest_names

_MAX_LINES = 12
_KEY = re.compile(r'Parser key "(?P<key>[^"]+)":')
_CLASS = re.compile(r"Problem with given class_path '(?P<path>[^']+)'")
_NOT_ACCEPTED = re.compile(r"Option '(?P<option>[^']+)' is not accepted")
_NO_ATTRIBUTE = re.compile(r"module '(?P<module>[^']+)' has no attribute '(?P<name>[^']+)'")
_GIVEN = re.compile(r"(?:Given|Got) value: (?P<value>.*)")
_UNKNOWN_KEY = re.compile(r"(?:does not accept option '|[Uu]nrecognized arguments: --)(?P<key>[\w.]+)")
_NOISE = ("Does not validate against any", "Subtypes:", "Errors:", "Given value type:", "Expected a <class 'NoneType'>")


class BriefParser(LightningArgumentParser):
    """LightningCLI's parser, with short error messages: `LightningCLI(..., parser_class=BriefParser)`."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong with the configuration and exit with status 2, or raise if `exit_on_error` is off."""
        if not self.exit_on_error:
            super().error(message, ex)
        command = self.prog.replace(" [options]", "")
        keys = _option_names(getattr(ex, "subcommand_parser", None) or self)
        self.exit(2, f"{command.split()[0]}: {shorten(message, keys)}\n`{command} --help` lists all options.\n")


def shorten(message: str, known_keys: list[str]) -> str:
    """Shorten an error message of jsonargparse to its cause.

    Args:
        message: the message, an indented tree of the types that jsonargparse tried.
        known_keys: dotted names of all options; the nearest are suggested for an unknown one.
    """
    unknown = _UNKNOWN_KEY.search(message)
    if unknown:
        return _explain_key(unknown["key"], known_keys)
    causes = sorted(_find_causes(message), key=lambda cause: (cause.is_name, len(cause.path)), reverse=True)
    for cause in causes:
        text = cause.explain()
        if text is not None:
            return f"{cause.path}: {text}"
    lines = [line for line in message.splitlines() if line.strip() and not line.strip(" -").startswith(_NOISE)]
    return "\n".join([*lines[:_MAX_LINES], *(["..."] if len(lines) > _MAX_LINES else [])])


@dataclass(frozen=True)
class _Cause:
    """An option whose name or value jsonargparse rejected."""

    path: str
    """The dotted path of the option in the configuration."""
    class_path: str | None
    """The import path of the class that takes the option."""
    option: str
    value: str
    """The given value as jsonargparse prints it, or the option's name if the name is wrong."""
    is_name: bool
    """Whether the name is wrong, not the value."""

    def explain(self) -> str | None:
        """Return what is wrong and what to do; `None` if jsonargparse's own message is more helpful."""
        cls = _import_class(self.class_path)
        if self.is_name:
            return _explain_name(cls, self.class_path, self.option)
        value = _parse_value(self.value)
        if isinstance(value, dict) and "class_path" in value:
            strays = sorted(set(value) - {"class_path", "init_args", "dict_kwargs"})
            if strays:
                return f"{strays[0]!r} is next to class_path. Put the options of a class under init_args."
        return _error_of(cls, self.option, value)


def _find_causes(message: str) -> Iterator[_Cause]:
    keys: list[tuple[int, str]] = []
    classes: list[tuple[int, str]] = []
    for line in message.splitlines():
        indent = len(line) - len(line.lstrip(" -"))
        for stack in (keys, classes):
            while stack and stack[-1][0] >= indent and line.strip():
                stack.pop()
        key, owner = _KEY.search(line), _CLASS.search(line)
        if key:
            keys.append((indent, key["key"]))
        elif owner:
            classes.append((indent, owner["path"]))
        path, current = ".".join(name for _, name in keys), classes[-1][1] if classes else None
        not_accepted, given, missing = _NOT_ACCEPTED.search(line), _GIVEN.search(line), _NO_ATTRIBUTE.search(line)
        if not_accepted:
            option = not_accepted["option"]
            yield _Cause(f"{path}.{option}", current, option, option, is_name=True)
        elif missing:
            yield _Cause(path, missing["module"], missing["name"], missing["name"], is_name=True)
        elif given and keys:
            yield _Cause(path, current, keys[-1][1], given["value"], is_name=False)


def _explain_name(cls: type | None, class_path: str | None, name: str) -> str | None:
    if cls is None:
        if class_path is None:
            return None
        known = [name for name in dir(importlib.import_module(class_path)) if name[0].isupper()]
        return f"There is no {class_path}.{name}.{_nearest(name, known)}"
    return (
        _error_of(cls, name, None)
        or f"{cls.__name__} has no option {name!r}.{_nearest(name, list(inspect.signature(cls).parameters))}"
    )


def _error_of(cls: type | None, option: str, value: object) -> str | None:
    """Return what a class of this package says about an option; `None` if it is another class, or accepts it."""
    if cls is None or not any(base.__module__.startswith("lightning_paral.") for base in cls.__mro__):
        return None
    try:
        cls(**{option: value})  # the constructor raises the most helpful message
    except ConfigurationError as error:
        return str(error)
    except Exception:
        return None
    return None


def _explain_key(key: str, known_keys: list[str]) -> str:
    known = {name for full in known_keys for name in (full, *_prefixes(full))}
    # Name the first wrong part: `trainr` of `trainr.strategy`.
    for part in (*_prefixes(key), key):
        if part not in known:
            depth = part.count(".")
            return f"There is no option {part!r}.{_nearest(part, [name for name in known if name.count('.') == depth])}"
    return f"There is no option {key!r}."


def _prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _nearest(name: str, known: list[str]) -> str:
    near = nearest_names(name, known, 2, 0.6)
    return f" {did_you_mean(near)}" if near else ""


def _option_names(parser: LightningArgumentParser) -> list[str]:
    try:
        return list(parser.get_defaults(skip_validation=True).keys(branches=True))
    except Exception:  # report the first error, not this one
        return []


def _import_class(class_path: str | None) -> type | None:
    module, _, name = (class_path or "").rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError):
        return None
    return found if isinstance(found, type) else None


def _parse_value(text: str) -> object:
    nested = re.fullmatch(r"NestedArg\(key='[^']*', val=(?P<value>.*)\)", text)
    text = nested["value"] if nested else text
    try:
        value = ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
    return _parse_value(value) if nested and isinstance(value, str) else value
