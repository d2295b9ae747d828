"""docs/reference/options.md: every option of every strategy, by name, type, default and docstring."""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Annotated, Any, Literal

import lightning_paral
from lightning_paral import STRATEGIES, options

STRATEGY_CLASSES = tuple(dict.fromkeys(entry.strategy for entry in STRATEGIES))
DATACLASSES = tuple(
    value
    for value in vars(options).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == options.__name__
    if not issubclass(value, options.StrategyOptions)
)
TRAINERS_OWN = {field.name for field in dataclasses.fields(options.StrategyOptions)} - {"checkpoint"}
INTRODUCTION = """\
# Options

Every option of every strategy and of the objects that group options. Pass them by keyword in Python, and under
`init_args` in YAML. Names and types are checked when the object is constructed.

<!-- Generated from the code by `python -m tests.docs --write`. -->
"""
VARIABLES = """\
## Environment variables

- **`PARAL_NVME_PATH`**: the folder for `offload_optimizer="nvme"`, `offload_parameters="nvme"` and the strategy
  `paral_zero3_nvme`.
- **`PARAL_PERIOD`**: the `period` of the strategies `paral_local_sgd` and `paral_diloco`, if they are selected by name.
- **`PARAL_TRACEBACK`**: `full` prints every frame and every cause of errors of this package.

torch's own, such as `GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`, `MASTER_ADDR` and `MASTER_PORT`, work as usual.
"""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a class."""

    name: str
    type: str
    default: str
    doc: str


def render_options() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for cls in STRATEGY_CLASSES:
        names = ", ".join(f"`{entry.name}`" for entry in STRATEGIES if entry.strategy is cls)
        found = list(options_of(cls))
        owned = [option for option in found if option.name in TRAINERS_OWN]
        parts += [f"## {cls.__name__}\n", f"{names}\n"]
        parts += [_entry(option) for option in found if option not in owned]
        listed = ", ".join(f"`{option.name}`" for option in owned)
        parts += [f"The Trainer sets these, so leave them out: {listed}.\n"]
    for dataclass in DATACLASSES:
        name = dataclass.__name__
        parts += [f"## {name}\n", _markdown(inspect.getdoc(dataclass).split("\n\n")[0]) + "\n"]
        if name not in lightning_paral.__all__:
            parts += ["These are not fields of an object: every strategy with ranks takes them directly.\n"]
        parts += [_entry(option) for option in options_of(dataclass)]
    return "\n".join([*parts, VARIABLES])


def options_of(cls: type) -> Iterator[Option]:
    """Yield the options of a class in the order of its signature, without its `**options`."""
    docs = docs_of(cls)
    hints = typing.get_type_hints(cls.__init__)
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        annotation = hints.get(name, parameter.annotation)
        default = "" if parameter.default is parameter.empty else _value(parameter.default)
        yield Option(name, _type(annotation), default, docs.get(name, ""))


def docs_of(cls: type) -> dict[str, str]:
    """Return the description of each option of a dataclass, or of a strategy, whose constructor collects them."""
    return _attribute_docs(cls) if cls in DATACLASSES else _argument_docs(inspect.cleandoc(cls.__init__.__doc__ or ""))


def _argument_docs(docstring: str) -> dict[str, str]:
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", docstring, flags=re.MULTILINE)
    if section is None:
        return {}
    docs: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", section[1].rstrip()):
        names, _, text = entry.strip().partition(": ")
        for name in " ".join(names.split()).split(", "):
            docs[name] = " ".join(text.split())
    return docs


def _attribute_docs(cls: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for before, node in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(node, ast.Expr):
            docs[before.target.id] = " ".join(inspect.cleandoc(str(ast.literal_eval(node.value))).split())
    return docs


def _entry(option: Option) -> str:
    default = f", default `{option.default}`" if option.default else ""
    text = option.doc[:1].upper() + option.doc[1:]
    end = "" if text.endswith((".", "?")) else "."
    return f"- **`{option.name}`**: `{option.type}`{default}\n\n    {_markdown(text + end)}\n"


def _markdown(text: str) -> str:
    text = " ".join(text.split())
    names = "|".join(cls.__name__ for cls in DATACLASSES)
    return re.sub(rf"([Ss]ee) `({names})`", lambda match: f"{match[1]} [{match[2]}](#{match[2].lower()})", text)


def _value(value: object) -> str:
    if isinstance(value, timedelta):
        return f"timedelta(seconds={value.total_seconds():g})"
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is types.NoneType:
        return "None"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type(argument) for argument in arguments)
    if origin is Annotated:
        return f"{_type(arguments[0])} >= {arguments[1].value}"
    if origin is Literal:
        return " | ".join(_value(argument) for argument in arguments)
    if origin is Callable or origin is typing.get_origin(typing.Callable[[], Any]):
        taken = "..." if arguments[0] is ... else f"[{', '.join(map(_type, arguments[0]))}]"
        return f"Callable[{taken}, {_type(arguments[1])}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    return getattr(annotation, "__name__", str(annotation))
