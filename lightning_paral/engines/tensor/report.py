"""What a plan means for a module: a report, and how it is printed."""

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text
from torch.nn import Module

from lightning_paral.engines.tensor.layers import split_dims
from lightning_paral.engines.tensor.plan import TensorPlan, folded
from lightning_paral.text import format_bytes, make_console, make_table


@dataclass(frozen=True, kw_only=True)
class Row:
    """Layers that are treated alike."""

    name: str
    """With a star in place of the numbers in which several layers differ."""
    count: int
    style: str
    """`"whole"` for layers that stay whole."""
    bytes: int
    """Of the parameters of all these layers."""
    rank_bytes: int
    """Of the parameters that a rank holds; the most of all ranks."""
    reason: str
    """Why the layers stay whole."""


@dataclass(frozen=True, kw_only=True)
class TensorReport:
    """What a plan means for a module."""

    module: str
    """The name of its class."""
    tensor_parallel: int
    """The number of tensor ranks."""
    parameter_bytes: int
    rank_bytes: int
    """Of the parameters that a rank holds."""
    other_bytes: int
    """Of parameters of modules that cannot be split, such as norms."""
    layers: tuple[Row, ...]


def report_of(module: Module, num_ranks: int, plan: TensorPlan) -> TensorReport:
    """Return the report of a plan. Shared parameters count once, for the first of their layers."""
    parts = dict(module.named_modules())
    seen: set[int] = set()
    groups: dict[tuple[Any, ...], list[tuple[str, int, int]]] = {}
    for name, part in parts.items():
        if name not in plan.splits and name not in plan.whole:
            continue
        before, after = _sizes(part, plan.splits.get(name), num_ranks, seen)
        key = (_kind_of(name), plan.splits.get(name, "whole"), _folded_text(plan.whole.get(name, "")))
        groups.setdefault(key, []).append((name, before, after))
    other = sum(
        parameter.numel() * parameter.element_size() for parameter in module.parameters() if id(parameter) not in seen
    )
    rows = tuple(
        Row(
            name=_common_name([name for name, _, _ in members]),
            count=len(members),
            style=key[1],
            bytes=sum(before for _, before, _ in members),
            rank_bytes=sum(after for _, _, after in members),
            reason=key[2],
        )
        for key, members in groups.items()
    )
    return TensorReport(
        module=type(module).__name__,
        tensor_parallel=num_ranks,
        parameter_bytes=other + sum(row.bytes for row in rows),
        rank_bytes=other + sum(row.rank_bytes for row in rows),
        other_bytes=other,
        layers=rows,
    )


def _kind_of(name: str) -> str:
    """Return the name that layers of repeated blocks share. A number that ends a name is a position in a block."""
    block, _, last = name.rpartition(".")
    return f"{folded(block)}.{last}" if any(part.isdigit() for part in block.split(".")) else folded(name)


def _common_name(names: list[str]) -> str:
    """Return the names as one, with a star where they differ."""
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _folded_text(text: str) -> str:
    """Return `text` with the names in it folded, so that the reasons of repeated blocks are equal."""
    return " ".join(folded(word) if "." in word.rstrip(".,:") else word for word in text.split(" "))


def _sizes(part: Module, style: str | None, num_ranks: int, seen: set[int]) -> tuple[int, int]:
    before = after = 0
    dims = split_dims(part, style)
    for name, parameter in part.named_parameters(recurse=False):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        size = parameter.numel() * parameter.element_size()
        before += size
        length = parameter.shape[dims[name]] if name in dims else 0
        after += size // length * -(-length // num_ranks) if length else size
    return before, after


def print_report(report: TensorReport) -> None:
    """Print a row for each kind of layers, and why others stay whole, with colour where the terminal has it."""
    split = [row for row in report.layers if row.style != "whole"]
    whole = [row for row in report.layers if row.style == "whole"]
    heading = (
        f"{report.module}, {report.tensor_parallel} tensor ranks: parameters of "
        f"{format_bytes(report.parameter_bytes)}, {format_bytes(report.rank_bytes)} per rank"
    )
    parts: list[RenderableType] = [Text(heading)]
    if split:
        headers = ["layers", "style", "whole", "per rank"]
        rows = [[_named(row), row.style, format_bytes(row.bytes), format_bytes(row.rank_bytes)] for row in split]
        parts.append(make_table(headers, rows, left=(0, 1)))
    else:
        parts.append(Text("No layer is split."))
    if whole:
        rows = [[_named(row), escape(row.reason), format_bytes(row.rank_bytes)] for row in whole]
        parts.append(make_table(["stays whole", "because", "per rank"], rows, left=(0, 1)))
    if report.other_bytes:
        parts.append(Text(f"Other parameters, such as those of norms, stay whole: {format_bytes(report.other_bytes)}."))
    make_console().print(Group(*parts))


def _named(row: Row) -> str:
    return escape(row.name) + (f" ({row.count})" if row.count > 1 else "")
