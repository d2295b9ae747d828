"""The table and the plot of `paral bench checkpoint`."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lightning_paral.diagnostics.bench.checkpoint import CheckpointResults
from lightning_paral.plots import import_pyplot
from lightning_paral.quantities import format_bytes, format_seconds
from lightning_paral.tables import make_table

_SHOWN = ("save", "stall", "full", "load", "consolidate", "write", "read")
_LABELS = {"stall": "async stall", "full": "full save", "write": "plain write", "read": "plain read"}
_COLORS = ("C0", "C1", "C2", "C3", "C4", "0.5", "0.75")


def checkpoint_table(results: CheckpointResults) -> RenderableType:
    """Return the table: a row for each strategy."""
    names = ["strategy", "size", "save", "async\nstall", "full\nsave", "load", "consol-\nidate"]
    headers = (*names, "plain\nwrite", "plain\nread")
    rows = [(row.strategy, format_bytes(row.size_bytes), *map(_cell, _seconds(row))) for row in results.rows]
    place = "disk" if results.is_cold else "page cache"
    note = Text(
        f"{results.module}, {results.num_params / 1e6:,.2f} M parameters, {results.num_ranks} ranks. Medians. plain: a "
        f"file of the same size, written and flushed by one process. Reads are from the {place}."
    )
    return Group(make_table(headers, rows), note)


def plot_checkpoint(results: CheckpointResults) -> Any:
    """Return a figure: a group of bars for each strategy."""
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(2.5 + 2.2 * len(results.rows), 4.5))
    width = 0.8 / len(_SHOWN)
    for number, name in enumerate(_SHOWN):
        places = [place + (number - len(_SHOWN) / 2 + 0.5) * width for place in range(len(results.rows))]
        heights = [getattr(row, name) or 0.0 for row in results.rows]
        label = {"stall": "async stall", "full": "full save", "write": "plain write", "read": "plain read"}.get(
            name, name
        )
        axes.bar(places, heights, width, label=label, color=_COLORS[number])
    axes.set_xticks(range(len(results.rows)), labels=[row.strategy for row in results.rows])
    axes.set_ylabel("seconds")
    axes.set_title(f"Checkpoints of {results.module}, {results.num_ranks} ranks")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _seconds(row: Any) -> list[float | None]:
    return [getattr(row, name) for name in _SHOWN]


def _cell(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)
