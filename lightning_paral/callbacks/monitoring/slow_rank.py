"""Find the rank for which the others wait."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_paral.callbacks.monitoring.rank_report import RankReport

_LEAST_SHARE = 0.05
"""A rank that is slower by a smaller part of a step is not named: ranks always differ a little."""


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """The rank that takes longest for its own part of a step."""

    rank: int
    lag: float
    """By how many seconds per step it is slower than the median of the other ranks."""
    share: float
    """`lag` as a part of a step."""

    @property
    def is_slow(self) -> bool:
        """Whether the others wait for it noticeably."""
        return self.share >= _LEAST_SHARE

    def __str__(self) -> str:
        return f"rank {self.rank} +{self.lag * 1e3:.3g} ms"


def find_slow_rank(reports: Mapping[int, RankReport]) -> SlowRank | None:
    """Return the slowest of the ranks; `None` if there are no two ranks to compare."""
    if len(reports) < 2:
        return None
    slowest = max(reports, key=lambda rank: reports[rank].own)
    others = statistics.median(report.own for rank, report in reports.items() if rank != slowest)
    step = max(report.step for report in reports.values())
    lag = reports[slowest].own - others
    return SlowRank(rank=slowest, lag=lag, share=lag / step if step else 0.0)
