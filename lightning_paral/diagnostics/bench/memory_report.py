"""The table and the plot of `paral bench memory`."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lightning_paral.diagnostics.bench.memory import MemoryResults, MemoryRow
from lightning_paral.plots import import_pyplot
from lightning_paral.quantities import format_bytes, format_seconds
from lightning_paral.tables import make_table

_HEADERS = (
    "ranks",
    "strategy",
    "start",
    "peak",
    "formula",
    "limit",
    "peak/\nlimit",
    "planned",
    "planned\n/ peak",
    "to step",
)


def memory_table(results: MemoryResults) -> RenderableType:
    """Return the table: a row for each number of ranks and strategy, and sentences on what is above a limit."""
    rows = []
    for row in results.rows:
        ratio = row.peak_bytes / row.limit_bytes
        cells = [_mib(size) for size in (row.start_bytes, row.peak_bytes, row.formula_bytes, row.limit_bytes)]
        above = row.is_sharded and ratio > 1
        rows.append(
            [
                str(row.num_ranks),
                row.strategy,
                *cells,
                f"[bold red]{ratio:.2f}[/]" if above else f"{ratio:.2f}",
                _mib(row.planned_bytes),
                f"{row.planned_ratio:.2f}",
                format_seconds(row.start_seconds),
            ]
        )
    place = "allocated on the GPU" if any(row.device == "cuda" for row in results.rows) else "resident, without imports"
    note = (
        f"{results.module}, {results.num_params / 1e6:,.2f} M parameters, batches of {results.batch_size}. MiB of the "
        f"rank that needs the most, {place}. start: the peak until the first step begins. formula: weights, gradients "
        f"and optimizer states. limit: 1.25 x formula + the largest unit ({format_bytes(results.unit_bytes)}) + saved "
        f"activations ({format_bytes(results.activation_bytes)}). planned: the peak that `paral plan` predicts. to "
        "step: from fit() to the first step."
    )
    verdicts = [_verdict("above the limit", results.above_limit()), _verdict("above DDP", results.above_ddp())]
    return Group(
        make_table(_HEADERS, rows, left=(1,), is_narrow=True), Text("\n".join([note, *verdicts, *results.notes]))
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f}" if size >= 10 * 2**20 else f"{size / 2**20:.1f}"


def _verdict(what: str, rows: list[MemoryRow]) -> str:
    named = ", ".join(f"{row.strategy} on {row.num_ranks}" for row in rows)
    return f"Sharded strategies of this package {what}: {named or 'none'}."


def plot_memory(results: MemoryResults) -> Any:
    """Return a figure: bars of measured peaks, with marks at the limit and at the planned peak; a panel per world."""
    pyplot = import_pyplot()
    worlds = sorted({row.num_ranks for row in results.rows})
    num_names = len({row.strategy for row in results.rows})
    figure, panels = pyplot.subplots(
        1, len(worlds), figsize=(2 + 3.5 * len(worlds), 1.4 + 0.4 * num_names), sharey=True, squeeze=False
    )
    for axes, num_ranks in zip(panels[0], worlds, strict=True):
        rows = [row for row in results.rows if row.num_ranks == num_ranks][::-1]
        names = [row.strategy for row in rows]
        colors = ["C0" if name.startswith("paral_") else "C7" for name in names]
        axes.barh(names, [row.peak_bytes / 2**30 for row in rows], color=colors, label="peak")
        for marker, label, sizes in (
            ("|", "limit", [row.limit_bytes for row in rows]),
            ("x", "planned", [row.planned_bytes for row in rows]),
        ):
            axes.plot(
                [size / 2**30 for size in sizes], names, marker, color="C3" if label == "limit" else "k", label=label
            )
        axes.set_title(f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'}")
        axes.set_xlabel("GiB per rank")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][-1].legend(fontsize=8)
    figure.suptitle(f"Peak memory of {results.module}, {results.num_params / 1e6:,.0f} M parameters")
    figure.tight_layout()
    return figure
