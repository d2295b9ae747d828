"""The table and the plot of `paral bench comm`."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lightning_paral.comm import ALL_REDUCE
from lightning_paral.diagnostics.bench.comm import FP32, CommResults
from lightning_paral.plots import import_pyplot
from lightning_paral.quantities import format_bytes, format_seconds
from lightning_paral.tables import make_table

HEADERS = ("algorithm", "wire", "size", "time", "algbw\nGB/s", "busbw\nGB/s", "share", "sent")


def comm_table(results: CommResults) -> RenderableType:
    """Return the table, with the fastest of each size in bold."""
    rows: list[tuple[str, ...]] = []
    fastest = {
        size: min(row.seconds for row in results.rows if row.size_bytes == size and _is_all_reduce(row.algorithm))
        for size in {row.size_bytes for row in results.rows if _is_all_reduce(row.algorithm)}
    }
    previous = None
    for row in results.rows:
        if previous is not None and row.size_bytes != previous:
            rows.append(("",) * len(HEADERS))
        previous = row.size_bytes
        best = row.seconds == fastest.get(row.size_bytes) and _is_all_reduce(row.algorithm)
        rows.append(
            (
                f"[bold green]{row.algorithm}[/]" if best else row.algorithm,
                row.wire,
                format_bytes(row.size_bytes),
                f"[bold green]{format_seconds(row.seconds)}[/]" if best else format_seconds(row.seconds),
                f"{row.algbw / 1e9:.3f}",
                f"{row.busbw / 1e9:.3f}",
                f"{row.share:.0%}",
                "" if row.sent_bytes is None else f"{max(row.sent_bytes) / row.size_bytes:.2f}",
            )
        )
    link = f"{results.point_to_point_bandwidth / 1e9:.2f} GB/s from one rank to another"
    note = Text(
        f"{results.num_ranks} ranks, {results.backend}; medians of the slowest rank's time. busbw counts what each "
        f"rank has to send. share is busbw beside {link}. sent: what the busiest rank sends, in sizes of the tensor."
    )
    return Group(make_table(HEADERS, rows, left=(0, 1)), note)


def plot_comm(results: CommResults) -> Any:
    """Return a figure: bus bandwidth by size, a line for each algorithm and wire dtype."""
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row.algorithm for row in results.rows))}
    styles = {FP32: "-", "bf16": "--", "fp16": ":"}
    for algorithm, wire in dict.fromkeys((row.algorithm, row.wire) for row in results.rows):
        rows = [row for row in results.rows if (row.algorithm, row.wire) == (algorithm, wire)]
        axes.plot(
            [row.size_bytes for row in rows],
            [row.busbw / 1e9 for row in rows],
            linestyle=styles[wire],
            color=colors[algorithm],
            marker="o",
            markersize=4,
            label=f"{algorithm}, {wire}",
        )
    limit = results.point_to_point_bandwidth / 1e9
    axes.axhline(limit, color="gray", linewidth=1, label="one rank to another")
    axes.set_xscale("log", base=2)
    sizes = sorted({row.size_bytes for row in results.rows})
    axes.set_xticks(sizes, labels=[format_bytes(size).replace(".00", "").replace(".0", "") for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("size of the fp32 tensor")
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.set_title(f"Collectives on {results.num_ranks} ranks, {results.backend}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def _is_all_reduce(algorithm: str) -> bool:
    return algorithm in ALL_REDUCE
