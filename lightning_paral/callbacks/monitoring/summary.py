"""The table at the end of a fit."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from lightning_paral.callbacks.monitoring.options import MonitorOptions
from lightning_paral.callbacks.monitoring.planned import PlannedCosts, compare
from lightning_paral.callbacks.monitoring.rank_report import RankReport
from lightning_paral.callbacks.monitoring.slow_rank import find_slow_rank
from lightning_paral.callbacks.monitoring.values import PHASES, format_rate, mean_over_ranks, rates_of
from lightning_paral.quantities import format_bytes, format_seconds
from lightning_paral.tables import make_table

_SIZES = {
    "sent_bytes": "sent per step",
    "device_peak": "device memory, peak",
    "host": "host memory",
    "host_peak": "host memory, peak",
}


def summary_of(
    reports: Mapping[int, RankReport],
    options: MonitorOptions,
    num_ranks: int,
    num_data_ranks: int,
    planned: PlannedCosts | None = None,
) -> RenderableType:
    """Return what rank 0 prints: a line with the rates, a table of times and memory, and the plan beside it.

    Args:
        reports: the reports over the whole fit of the ranks that have reported, at least one.
        options: the options.
        num_ranks: the number of ranks.
        num_data_ranks: the number of ranks that draw different samples.
        planned: the plan, if there is one.
    """
    rates, slow = rates_of(reports, options, num_data_ranks), find_slow_rank(reports)
    num_steps = max(report.num_steps for report in reports.values())
    first = [f"{num_steps} step{'s' * (num_steps != 1)}", f"{format_rate(rates.samples)} samples/s"]
    if rates.tokens is not None:
        first.append(f"{format_rate(rates.tokens)} tokens/s")
    if rates.mfu is not None:
        first.append(f"MFU {rates.mfu:.1%}")
    missing = num_ranks - len(reports)
    first.append(
        f"{num_ranks} rank{'s' * (num_ranks != 1)}" + (f", of which {missing} did not report" if missing else "")
    )
    lines: list[RenderableType] = [Text("ParalMonitor: " + ", ".join(first), style="bold")]
    headers = ["per step", "mean", "share", *(("least", "most") if len(reports) > 1 else ())]
    lines.append(make_table(headers, [*_times(reports), *_sizes(reports)]))
    if slow is not None and slow.is_slow:
        lines.append(
            Text(
                f"Rank {slow.rank} is the slowest: its own part of a step takes {format_seconds(slow.lag)} longer than "
                f"that of the other ranks, {slow.share:.0%} of a step.",
                style="yellow",
            )
        )
    if planned is not None:
        lines += _plan(planned, reports)
    return Group(*lines)


def _plan(planned: PlannedCosts, reports: Mapping[int, RankReport]) -> list[RenderableType]:
    rows = [
        [
            each.title,
            format_bytes(each.predicted),
            "unknown" if each.measured is None else format_bytes(each.measured),
            "" if each.error is None else f"{each.error:+.1%}",
        ]
        for each in compare(planned, reports)
    ]
    table = make_table([f"plan {planned.strategy}".rstrip(), "predicted", "measured", "error"], rows)
    return [table, *(Text(f"Note: {note}") for note in planned.notes)]


def _times(reports: Mapping[int, RankReport]) -> list[list[str]]:
    whole = mean_over_ranks(reports, lambda report: report.step) or float("nan")
    rows = []
    for name in ("step", *PHASES):
        mean = mean_over_ranks(reports, lambda report, name=name: getattr(report, name))  # type: ignore[misc]
        if mean is not None:
            rows.append([name, format_seconds(mean), f"{mean / whole:.0%}", *_extremes(reports, name, format_seconds)])
    return rows


def _sizes(reports: Mapping[int, RankReport]) -> list[list[str]]:
    rows = []
    for name, title in _SIZES.items():
        mean = mean_over_ranks(reports, lambda report, name=name: getattr(report, name))  # type: ignore[misc]
        if mean is not None:
            rows.append([title, format_bytes(mean), "", *_extremes(reports, name, format_bytes)])
    return rows


def _extremes(reports: Mapping[int, RankReport], name: str, show: Callable[[float], str]) -> Sequence[str]:
    """Return the smallest and the largest value, with their ranks; nothing if there is one rank."""
    values = {rank: getattr(report, name) for rank, report in reports.items() if getattr(report, name) is not None}
    if len(reports) < 2:
        return ()
    least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return f"{show(values[least])} (rank {least})", f"{show(values[most])} (rank {most})"
