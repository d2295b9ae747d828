"""Values of all ranks for loggers and for the progress bar."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_paral.callbacks.monitoring.options import MonitorOptions
from lightning_paral.callbacks.monitoring.planned import PlannedCosts
from lightning_paral.callbacks.monitoring.rank_report import RankReport
from lightning_paral.callbacks.monitoring.slow_rank import find_slow_rank
from lightning_paral.quantities import format_seconds

PREFIX = "paral/"
PHASES = ("data", "forward", "backward", "optimizer", "waiting", "other")
"""The parts of a step, as attributes of a `RankReport`."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How much all ranks do per second."""

    samples: float
    tokens: float | None
    mfu: float | None
    """The part of the peak FLOP/s that is used, from 0 to 1."""


def mean_over_ranks(reports: Mapping[int, RankReport], value_of: Callable[[RankReport], float | None]) -> float | None:
    """Return the mean of a value over the ranks that know it; `None` if none does."""
    known = [value for value in map(value_of, reports.values()) if value is not None]
    return statistics.fmean(known) if known else None


def rates_of(reports: Mapping[int, RankReport], options: MonitorOptions, num_data_ranks: int) -> Rates:
    """Return the rates of all ranks.

    Args:
        reports: the reports of the ranks that have reported. The others count as their mean.
        options: the options.
        num_data_ranks: the number of ranks that draw different samples.
    """
    step = mean_over_ranks(reports, lambda report: report.step) or float("nan")
    samples = mean_over_ranks(reports, lambda report: report.num_samples) or 0.0
    tokens = mean_over_ranks(reports, lambda report: report.num_tokens) or 0.0
    mfu = None
    if options.flops_per_step is not None and options.peak_flops is not None:
        mfu = options.flops_per_step / step / options.peak_flops
    return Rates(
        samples=samples * num_data_ranks / step,
        tokens=None if options.tokens_per_sample is None else tokens * num_data_ranks / step,
        mfu=mfu,
    )


def values_for_loggers(
    reports: Mapping[int, RankReport],
    options: MonitorOptions,
    num_data_ranks: int,
    planned: PlannedCosts | None = None,
) -> dict[str, float]:
    """Return the values by name. Times and bytes on the wire are means over the ranks, memory is that of the largest.

    Args:
        reports: the reports of the ranks that have reported, at least one.
        options: the options.
        num_data_ranks: the number of ranks that draw different samples.
        planned: the plan, if there is one.
    """
    rates, slow = rates_of(reports, options, num_data_ranks), find_slow_rank(reports)
    values: dict[str, float | None] = {"step_seconds": mean_over_ranks(reports, lambda report: report.step)}
    for phase in PHASES:
        values[f"{phase}_seconds"] = mean_over_ranks(reports, lambda report, phase=phase: getattr(report, phase))  # type: ignore[misc]
    values |= {"samples_per_second": rates.samples, "tokens_per_second": rates.tokens, "mfu": rates.mfu}
    values["sent_bytes"] = mean_over_ranks(reports, lambda report: report.sent_bytes)
    device_peaks = [report.device_peak for report in reports.values() if report.device_peak is not None]
    values["device_peak_bytes"] = max(device_peaks, default=None)
    values["host_bytes"] = max(report.host for report in reports.values())
    values["host_peak_bytes"] = max(report.host_peak for report in reports.values())
    if planned is not None:
        values |= {"planned_bytes": planned.peak_bytes, "planned_sent_bytes": planned.sent_bytes}
    if slow is not None:
        values |= {"slowest_rank": slow.rank, "slowest_rank_lag_seconds": slow.lag}
    return {PREFIX + name: value for name, value in values.items() if value is not None}


def text_for_progress_bar(reports: Mapping[int, RankReport], options: MonitorOptions, num_data_ranks: int) -> str:
    """Return the most important values as a short text, such as `12.3 ms, 830 samples/s, waiting 31%`."""
    rates, slow = rates_of(reports, options, num_data_ranks), find_slow_rank(reports)
    step = mean_over_ranks(reports, lambda report: report.step) or float("nan")
    parts = [format_seconds(step)]
    parts.append(
        f"{format_rate(rates.samples)} samples/s" if rates.tokens is None else f"{format_rate(rates.tokens)} tokens/s"
    )
    if rates.mfu is not None:
        parts.append(f"MFU {rates.mfu:.0%}")
    for name in ("data", "waiting"):
        seconds = mean_over_ranks(reports, lambda report, name=name: getattr(report, name))  # type: ignore[misc]
        if seconds is not None and seconds >= 0.05 * step:
            parts.append(f"{name} {seconds / step:.0%}")
    if slow is not None and slow.is_slow:
        parts.append(str(slow))
    return ", ".join(parts)


def format_rate(rate: float) -> str:
    """Return a number per second with three digits, for example `1.23k`."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= factor:
            return f"{rate / factor:.3g}{unit}"
    return f"{rate:.3g}"
