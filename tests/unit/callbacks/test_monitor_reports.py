"""Reports of ranks become values, a text and a table."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_paral.callbacks.monitoring.batches import count_samples
from lightning_paral.callbacks.monitoring.options import MonitorOptions
from lightning_paral.callbacks.monitoring.planned import PlannedCosts
from lightning_paral.callbacks.monitoring.rank_report import RankReport
from lightning_paral.callbacks.monitoring.slow_rank import find_slow_rank
from lightning_paral.callbacks.monitoring.summary import summary_of
from lightning_paral.callbacks.monitoring.values import values_for_loggers


def report(**values: Any) -> RankReport:
    seconds = {"data": 0.01, "forward": 0.0203, "backward": 0.04, "optimizer": 0.01, "waiting": 0.01, "other": 0.01}
    amounts = {"own": 0.09, "num_steps": 10, "num_samples": 8.0, "num_tokens": 800.0, "sent_bytes": 2048.0}
    memory = {"device_peak": None, "host": 2**30, "host_peak": 2**31}
    return RankReport(**{**seconds, **amounts, **memory, **values})


def printed(
    width: int,
    reports: dict[int, RankReport],
    options: MonitorOptions,
    num_ranks: int,
    planned: PlannedCosts | None = None,
) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(summary_of(reports, options, num_ranks, num_ranks, planned))
    return capture.get()


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


@pytest.mark.parametrize("width", [80, 120])
def test_summary_fits_the_terminal(width: int) -> None:
    options = MonitorOptions(tokens_per_sample=100, flops_per_step=1e9, peak_flops=1e11)
    planned = PlannedCosts(peak_bytes=2**30, sent_bytes=1024.0, strategy="paral_fsdp", notes=("It is so.",))
    reports = {0: report(device_peak=2**31), 1: report(device_peak=2**31 + 5, own=0.15)}
    text = printed(width, reports, options, 3, planned)
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines() if line.strip()}

    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "3 ranks, of which 1 did not report" in " ".join(text.split())
    assert lines["step"].split()[2:4] == ["ms", "100%"]
    assert " ".join(lines["waiting"].split()) == "waiting 10.0 ms 10% 10.0 ms (rank 0) 10.0 ms (rank 0)"
    assert lines["plan paral_fsdp"].split()[2:] == ["predicted", "measured", "error"]
    rows = [" ".join(line.split()) for line in text.split("plan paral_fsdp")[1].splitlines()]
    assert "device memory, peak 1.00 GiB 2.00 GiB -50.0%" in rows
    assert "sent per step 1.00 KiB 2.00 KiB -50.0%" in rows
    assert "Note: It is so." in text
    assert "Rank 1 is the slowest: its own part of a step takes 60.0 ms longer" in " ".join(text.split())


@dataclass
class Batch:
    """A batch as an object."""

    ids: list[str]
    inputs: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        (torch.zeros(3, 2), 3),
        (torch.zeros(()), 1),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ({"labels": None, "inputs": {"ids": torch.zeros(5, 7)}}, 5),
        ((["a", "b"], torch.zeros(2)), 2),
        (Batch(["a", "b"], torch.zeros(2, 2)), 2),
        ([], 0),
        (None, 0),
        ("text", 0),
        (7, 0),
    ],
)
def test_samples_of_a_batch(batch: Any, number: int) -> None:
    assert count_samples(batch) == number
