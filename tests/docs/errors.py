"""docs/reference/errors.md: every error and warning of the package, extracted from its source."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning_paral
from lightning_paral import errors
from tests.tables import markdown

ROOT = Path(lightning_paral.__file__).parent
TOPICS = {
    "Names, options, commands": "options option_types registry cli quantities",
    "Ranks and process groups": "distributed strategies",
    "Data and evaluation": "data",
    "Modules": "model",
    "Averages of weights": "averaging",
    "Callbacks": "callbacks",
    "DP": "engines/dp strategies/dp",
    "DDP": "engines/ddp strategies/ddp comm",
    "FSDP": "engines/fsdp strategies/fsdp",
    "ZeRO": "engines/zero strategies/zero",
    "Pipeline": "engines/pipeline strategies/pipeline",
    "Tensor parallelism": "engines/tensor strategies/tensor_parallel",
    "Checkpoints": "checkpoint strategies/checkpoint_mixin",
    "Plans": "planning",
    "Checks of a project and a machine": "diagnostics",
    "Versions": "compat tested_versions _version",
}
"""Paths of modules and folders by heading. The longest path that contains a module decides."""
NOTES = {
    "Ranks and process groups": "See also [Clusters](../guides/clusters.md).",
    "Data and evaluation": "See also [Data and exact evaluation](../guides/data.md).",
    "Modules": "See also [Your own project](../guides/own-project.md).",
    "DP": "See also [Limits](../limits.md#dp).",
    "DDP": "See also [Limits](../limits.md#ddp).",
    "FSDP": "See also [Limits](../limits.md#fsdp). `paral_ddp` usually trains what FSDP refuses.",
    "ZeRO": "See also [Limits](../limits.md#zero). `paral_fsdp` or `paral_ddp` usually train what ZeRO refuses.",
    "Pipeline": "See also [Pipeline](../strategies/pipeline.md). `paral_fsdp` usually trains what a pipeline refuses.",
    "Tensor parallelism": "See also [Tensor parallelism](../strategies/tensor.md).",
    "Checkpoints": "A checkpoint that is damaged, incomplete or hostile is refused before any weight changes. Use an "
    "earlier one, or copy the named file again. `paral verify` lists all faults of a checkpoint. About trust, see "
    "[Safe loading](../guides/checkpoints.md#safe-loading).",
    "Versions": "Install tested versions: see [Requirements](../index.md#requirements).",
}
INTRODUCTION = """\
# Errors

Every error and every warning of this package, by topic. `…` stands for values that a message fills in. Search this page
for the first words of your message; the rest says what to do. See also [A run that failed](../guides/failures.md).

<!-- Generated from the code by `python -m tests.docs --write`. -->
"""
WARNINGS = ("rank_zero_warn", "warn")


@dataclass(frozen=True)
class Message:
    """The template of a message in the source."""

    kind: str
    topic: str
    text: str


def render_errors() -> str:
    """Return the page."""
    kinds = [
        (f"`{name}`", " ".join((value.__doc__ or "").split())) for name, value in vars(errors).items() if name[0] != "_"
    ]
    parts = [INTRODUCTION, "## Classes\n", markdown(("class", "what it means"), kinds), ""]
    by_topic: dict[str, list[Message]] = defaultdict(list)
    for message in messages():
        by_topic[message.topic].append(message)
    for topic in TOPICS:
        raised = [message for message in by_topic[topic] if message.kind not in WARNINGS]
        warned = [message for message in by_topic[topic] if message.kind in WARNINGS]
        if raised or warned:
            parts += [f"## {topic}\n", *([NOTES[topic] + "\n"] if topic in NOTES else []), *_entries(raised)]
        if warned:
            parts += ["Warnings:\n", *_entries(warned)]
    return "\n".join(parts).rstrip() + "\n"


@cache
def messages() -> list[Message]:
    """Return all messages, each once, in the order of the files."""
    found: dict[tuple[str, str], Message] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for kind, texts in _raised_in(path):
            for text in texts:
                words = " ".join(re.sub(r"…[:.]?", "", text).split())
                if len(words.split()) >= 3 and re.search(r"[.:?…)'`]$", text.strip()):
                    found.setdefault((topic_of(path), words), Message(kind, topic_of(path), text))
    return list(found.values())


def topic_of(path: Path) -> str:
    """Return the heading for messages of a module."""
    module = path.relative_to(ROOT).with_suffix("").as_posix()
    fitting = [
        (len(start), topic)
        for topic, starts in TOPICS.items()
        for start in starts.split()
        if module == start or module.startswith(f"{start}/")
    ]
    assert fitting, f"{module}: give it a topic in {__file__}"
    return max(fitting)[1]


@cache
def _error_classes() -> frozenset[str]:
    """Return the names of all classes that derive from `ParalError`."""
    names, grown = {errors.ParalError.__name__}, True
    while grown:
        more = {
            node.name
            for node in _nodes_of_package(ast.ClassDef)
            if names & {ast.unparse(base).split(".")[-1] for base in node.bases}
        }
        grown = not more <= names
        names |= more
    return frozenset(names)


def _raised_in(path: Path) -> Iterator[tuple[str, list[str]]]:
    kinds = {*_error_classes(), *WARNINGS}
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for node in ast.walk(function):
            if path.stem == "explain_errors" and isinstance(node, ast.Return) and node.value is not None:
                yield "ConfigurationError", _templates(node.value, function)
    for function in functions:
        for node in ast.walk(function):
            name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) and node.args else ""
            if name in kinds:
                yield name, _templates(node.args[0], function)  # type: ignore[attr-defined]


def _templates(node: ast.expr, function: ast.FunctionDef, depth: int = 0) -> list[str]:
    """Return the possible texts of an expression, with `…` for values that are filled in; empty if unknown."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        parts = [
            "…" if isinstance(value, ast.FormattedValue) else str(ast.literal_eval(value)) for value in node.values
        ]
        return ["".join(parts)]
    if isinstance(node, ast.BinOp):
        left, right = (_templates(side, function, depth) or ["…"] for side in (node.left, node.right))
        return [first + second for first in left for second in right]
    if isinstance(node, ast.IfExp):
        return _templates(node.body, function, depth) + _templates(node.orelse, function, depth)
    if isinstance(node, ast.Name):
        assigned = [
            statement.value
            for statement in ast.walk(function)
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id
        ]
        return [text for value in assigned if depth < 3 for text in _templates(value, function, depth + 1)]
    if isinstance(node, ast.Call) and depth < 3:
        called = ast.unparse(node.func).split(".")[-1]
        return [
            text
            for other in _nodes_of_package(ast.FunctionDef)
            if other.name == called
            for statement in ast.walk(other)
            if isinstance(statement, ast.Return) and statement.value is not None
            for text in _templates(statement.value, other, depth + 1)
        ]
    return []


@cache
def _nodes_of_package(kind: type[Any]) -> tuple[Any, ...]:
    paths = sorted(ROOT.rglob("*.py"))
    return tuple(node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kind))


def _entries(found: list[Message]) -> Iterator[str]:
    for message in sorted(found, key=lambda message: message.text.lstrip("…`'\" ").lower()):
        what, remedy = split(message.text)
        kind = "" if message.kind in ("ConfigurationError", *WARNINGS) else f" `{message.kind}`"
        yield f"- **{_escaped(what)}**{' ' if remedy else ''}{_escaped(remedy)}{kind}"
    yield ""


def split(text: str) -> tuple[str, str]:
    """Return the first sentence, which says what is wrong, and the rest, which says what to do."""
    text = re.sub(r"…(\s*…)+", "…", " ".join(text.split()))
    end = re.search(r"(?<=[\w)\]'\"`…])[.?] (?=[A-Z`…])", text)
    return (text, "") if end is None else (text[: end.start() + 1], text[end.end() :])


def _escaped(text: str) -> str:
    parts = text.split("`")
    if len(parts) % 2 == 0:  # unbalanced
        parts = [text.replace("`", "'")]
    outside = [re.sub(r"([*_<>\[\]|~^])", r"\\\1", part) for part in parts[::2]]
    return "`".join(part for pair in zip(outside, [*parts[1::2], ""], strict=True) for part in pair).removesuffix("`")
