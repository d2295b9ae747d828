"""Reports of ranks become values, a text and a table."""

import math
from typing import Any

from lightning_paral.callbacks.monitoring.options import MonitorOptions
from lightning_paral.callbacks.monitoring.planned import PlannedCosts
from lightning_paral.callbacks.monitoring.rank_report import RankReport
from lightning_paral.callbacks.monitoring.slow_rank import find_slow_rank
from lightning_paral.callbacks.monitoring.values import values_for_loggers


def report(**values: Any) -> RankReport:
    seconds = {"data": 0.01, "forward": 0.0203, "backward": 0.04, "optimizer": 0.01, "waiting": 0.01, "other": 0.01}
    amounts = {"own": 0.09, "num_steps": 10, "num_samples": 8.0, "num_tokens": 800.0, "sent_bytes": 2048.0}
    memory = {"device_peak": None, "host": 2**30, "host_peak": 2**31}
    return RankReport(**{**seconds, **amounts, **memory, **values})


def test_slowest_rank_is_compared_with_the_median_of_the_others() -> None:
    slow = find_slow_rank({0: report(), 1: report(own=0.15), 2: report(own=0.07)})
    assert slow is not None

    assert (slow.rank, slow.is_slow) == (1, True)
    assert math.isclose(slow.lag, 0.07)
    assert math.isclose(slow.share, 0.07 / report().step)
    assert str(slow) == "rank 1 +70 ms"
    equal = find_slow_rank({0: report(), 1: report(own=0.0901)})
    assert equal is not None
    assert not equal.is_slow
    assert find_slow_rank({0: report()}) is None


def test_names_of_values_have_a_prefix_and_unknown_ones_are_left_out() -> None:
    reports = {0: report(), 1: report(host=3, host_peak=2**32, own=0.1)}
    values = values_for_loggers(reports, MonitorOptions(), 2, PlannedCosts(peak_bytes=7, sent_bytes=5.0))
    alone = values_for_loggers({0: report(waiting=None, sent_bytes=None)}, MonitorOptions(), 1)

    assert all(name.startswith("paral/") for name in values)
    assert (values["paral/host_peak_bytes"], values["paral/planned_bytes"]) == (2**32, 7)
    assert values["paral/slowest_rank"] == 1
    unknown = {"paral/waiting_seconds", "paral/sent_bytes", "paral/slowest_rank", "paral/slowest_rank_lag_seconds"}
    assert values.keys() - alone.keys() == {*unknown, "paral/planned_bytes", "paral/planned_sent_bytes"}
