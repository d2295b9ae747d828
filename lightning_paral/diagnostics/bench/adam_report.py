"""The table and the plot of `paral bench adam`."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lightning_paral.diagnostics.bench.adam import OPTIMIZERS, TENSOR_ELEMENTS, AdamResults
from lightning_paral.plots import import_pyplot
from lightning_paral.quantities import format_seconds
from lightning_paral.tables import make_table


def adam_table(results: AdamResults) -> RenderableType:
    """Return the table: a row for each size and number of threads, a column for each implementation."""
    names = [name for name in OPTIMIZERS if any(row.optimizer == name for row in results.rows)]
    cases = dict.fromkeys((row.num_threads, row.num_params) for row in results.rows)
    rows = []
    for threads, size in cases:
        found = {row.optimizer: row for row in results.rows if (row.num_threads, row.num_params) == (threads, size)}
        cells = []
        for name in names:
            ratio = found[name].ratio
            beside = f" [dim]{ratio:4.2f}x[/]" if ratio is not None and name != OPTIMIZERS[0] else ""
            cells.append(f"{format_seconds(found[name].seconds)}{beside}")
        rows.append((f"{size / 1e6:g} M", str(threads), *cells))
    note = Text(
        "Seconds of a step of AdamW in fp32, medians, and how many times as long as DeepSpeedCPUAdam's. "
        f"Parameters are in tensors of {TENSOR_ELEMENTS / 1e6:g} M elements."
    )
    return Group(make_table(("params", "threads", *_headers(names)), rows, left=()), note)


def _headers(names: list[str]) -> list[str]:
    return [name.replace("DeepSpeedCPU", "DeepSpeed\nCPU") for name in names]


def plot_adam(results: AdamResults) -> Any:
    """Return a figure: parameters per second by size, a line for each implementation and number of threads."""
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    threads = sorted({row.num_threads for row in results.rows})
    styles = ["-", "--", ":", "-."]
    for number, name in enumerate(OPTIMIZERS):
        for index, count in enumerate(threads):
            rows = [row for row in results.rows if (row.optimizer, row.num_threads) == (name, count)]
            if rows:
                axes.plot(
                    [row.num_params / 1e6 for row in rows],
                    [row.num_params / row.seconds / 1e6 for row in rows],
                    linestyle=styles[index % len(styles)],
                    color=f"C{number}",
                    marker="o",
                    markersize=4,
                    label=f"{name}, {count} thread{'s' if count > 1 else ''}",
                )
    axes.set_xscale("log")
    sizes = sorted({row.num_params / 1e6 for row in results.rows})
    axes.set_xticks(sizes, labels=[f"{size:g} M" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("parameters")
    axes.set_ylabel("million parameters per second")
    axes.set_title("A step of AdamW on the host")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure
