"""The table and the plot of `paral bench step`."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lightning_paral.diagnostics.bench.step_results import StepResults
from lightning_paral.plots import import_pyplot
from lightning_paral.quantities import format_bytes, format_seconds
from lightning_paral.tables import make_table


def step_table(results: StepResults) -> RenderableType:
    """Return the table: a row for each strategy."""
    has_device = any(row.peak_device_bytes is not None for row in results.rows)
    headers = ["strategy", "step", "samples\n/s", "peak\nhost"]
    headers += ["peak\ndevice"] if has_device else []
    headers += ["sent\n/ step", "start", "/ raw", "/ PL"]
    rows = []
    for row in results.rows:
        cells = [
            row.strategy,
            format_seconds(row.seconds),
            f"{row.samples_per_second:,.0f}",
            format_bytes(row.peak_host_bytes),
        ]
        if has_device:
            cells.append("" if row.peak_device_bytes is None else format_bytes(row.peak_device_bytes))
        cells += [format_bytes(row.sent_bytes), format_seconds(row.start_seconds)]
        cells += [_ratio(row.ratio_to_raw), _ratio(row.ratio_to_lightning)]
        rows.append(cells)
    note = Text(
        f"{results.module}, {results.num_params / 1e6:,.2f} M parameters, {results.num_ranks} ranks with batches of "
        f"{results.batch_size}. Medians. Peaks include imports. start lasts to the end of the first step. "
        "/ raw and / PL: divided by the hand-written loop, and by Lightning's own strategy."
    )
    return Group(make_table(headers, rows), note)


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def plot_step(results: StepResults) -> Any:
    """Return a figure: step times and peak memory, a bar for each strategy."""
    pyplot = import_pyplot()
    rows = results.rows[::-1]
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(10, 1.2 + 0.45 * len(rows)), sharey=True)
    names = [row.strategy for row in rows]
    colors = ["C0" if name.startswith("paral_") else "C7" for name in names]
    bars = times.barh(names, [row.seconds * 1e3 for row in rows], color=colors)
    times.bar_label(bars, [format_seconds(row.seconds) for row in rows], padding=3, fontsize=8)
    times.set_xlabel("step (ms)")
    peaks = [row.peak_host_bytes if row.peak_device_bytes is None else row.peak_device_bytes for row in rows]
    bars = memory.barh(names, [peak / 2**30 for peak in peaks], color=colors)
    memory.bar_label(bars, [format_bytes(peak) for peak in peaks], padding=3, fontsize=8)
    memory.set_xlabel("peak memory per rank (GiB)")
    for axes in (times, memory):
        axes.margins(x=0.18)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A training step of {results.module}, {results.num_ranks} ranks")
    figure.tight_layout()
    return figure
