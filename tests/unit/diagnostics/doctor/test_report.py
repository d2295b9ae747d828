"""The report as tables and as JSON, and the options of the command."""

import json

import pytest
from rich.console import Console

from lightning_paral import STRATEGIES
from lightning_paral.diagnostics.doctor.facts import Fact
from lightning_paral.diagnostics.doctor.processes import CollectiveResults, CollectiveRow
from lightning_paral.diagnostics.doctor.readiness import Readiness
from lightning_paral.diagnostics.doctor.report import Report, render
from tests.command import run_paral

FACTS = (
    Fact(name="torch", found="2.13.0 (tested: >=2.11,<2.14)"),
    Fact(name="libaio", found="no library", state="warning", advice="apt-get install libaio-dev", data={"path": None}),
)
ROWS = (
    CollectiveRow(name="start", state="ok", latency=3.0),
    CollectiveRow(name="broadcast", state="ok", latency=1e-4, bandwidth=2.0**30),
    CollectiveRow(name="all-reduce", state="failed", reason="rank 0: RuntimeError: [enforce fail at x] " + "y" * 90),
    CollectiveRow(name="send/recv", state="skipped", reason="it needs two ranks"),
)


def report() -> Report:
    names = [entry.name for entry in STRATEGIES]
    return Report(
        facts=FACTS,
        strategies=(
            *(Readiness(name=name) for name in names[:-2]),
            *(Readiness(name=name, lacks=("libaio",), advice=("apt-get install libaio-dev",)) for name in names[-2:]),
        ),
        collectives=CollectiveResults(ranks=2, device="cpu", backend="gloo", rows=ROWS),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_screen_fits_and_says_everything(width: int) -> None:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render(report()))
    printed = capture.get().splitlines()

    assert max(map(len, printed)) <= width
    words = " ".join(" ".join(printed).split())
    for entry in STRATEGIES:
        assert entry.name in words
    for part in ("apt-get install libaio-dev", "100 µs", "1.00 GiB/s", "[enforce fail", "it needs two ranks"):
        assert part in words
    assert printed[-1] == "Broken: all-reduce."


def test_json_has_the_same() -> None:
    found = json.loads(json.dumps(report().as_json()))

    assert found["broken"] == ["all-reduce"]
    assert found["facts"][1]["advice"] == "apt-get install libaio-dev"
    assert [entry["ready"] for entry in found["strategies"]] == [True] * (len(STRATEGIES) - 2) + [False] * 2
    assert [row["state"] for row in found["collectives"]["rows"]] == ["ok", "ok", "failed", "skipped"]


@pytest.mark.parametrize("ranks", ["0", "-3"])
def test_ranks_have_to_be_positive(ranks: str) -> None:
    expected = f"paral: --ranks {ranks} is not a number of ranks. Give 1 or more."
    assert run_paral("doctor", "--ranks", ranks) == expected
