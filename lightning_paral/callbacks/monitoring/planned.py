"""What was planned for a rank, to show it beside what is measured."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_paral.callbacks.monitoring.rank_report import RankReport


@dataclass(frozen=True, kw_only=True)
class PlannedCosts:
    """The costs of a rank in a step, which is a training batch."""

    peak_bytes: int
    """On the device; on CPU, in host memory."""
    sent_bytes: float | None = None
    """`None` if they were not planned."""
    strategy: str = ""
    """What was planned, such as `paral_fsdp`; empty if the user gave the bytes."""
    notes: tuple[str, ...] = ()
    """What was assumed, and what is not in the figures."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A predicted and a measured number of bytes."""

    title: str
    predicted: float
    measured: float | None
    """`None` if it is unknown."""

    @property
    def error(self) -> float | None:
        """By which part of the measured number the prediction is too large; `None` if that is unknown."""
        return self.predicted / self.measured - 1 if self.measured else None


def compare(planned: PlannedCosts, reports: Mapping[int, RankReport]) -> list[Comparison]:
    """Return what was planned beside what was measured: memory of the rank with the most, and traffic.

    Args:
        planned: the plan, for the rank that needs the most.
        reports: the reports of the ranks, at least one.
    """
    device_peaks = [report.device_peak for report in reports.values() if report.device_peak is not None]
    grown = [report.host_grown for report in reports.values() if report.host_grown is not None]
    found = [
        Comparison(
            title="device memory, peak" if device_peaks else "host memory, grown",
            predicted=planned.peak_bytes,
            measured=max(device_peaks or grown, default=None),
        )
    ]
    if planned.sent_bytes is not None:
        sent = [report.sent_bytes for report in reports.values() if report.sent_bytes is not None]
        found.append(Comparison(title="sent per step", predicted=planned.sent_bytes, measured=max(sent, default=None)))
    return found
