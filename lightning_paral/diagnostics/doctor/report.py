"""Everything that the doctor found, as JSON and as tables for a terminal."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from lightning_paral.diagnostics.doctor.devices import device_facts
from lightning_paral.diagnostics.doctor.facts import Fact
from lightning_paral.diagnostics.doctor.host import host_facts
from lightning_paral.diagnostics.doctor.network import network_facts
from lightning_paral.diagnostics.doctor.nvme import nvme_fact
from lightning_paral.diagnostics.doctor.operators import operator_facts
from lightning_paral.diagnostics.doctor.processes import CollectiveResults, CollectiveRow, check_ranks, run_collectives
from lightning_paral.diagnostics.doctor.rank import START
from lightning_paral.diagnostics.doctor.readiness import Readiness, strategies_readiness
from lightning_paral.diagnostics.doctor.versions import version_facts
from lightning_paral.quantities import format_bytes, format_seconds
from lightning_paral.tables import make_table

_STYLES = {
    "ok": "green",
    "note": "dim",
    "warning": "yellow",
    "broken": "bold red",
    "failed": "bold red",
    "skipped": "dim",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the doctor found."""

    facts: tuple[Fact, ...]
    strategies: tuple[Readiness, ...]
    collectives: CollectiveResults

    @property
    def broken(self) -> tuple[str, ...]:
        """The names of the facts that are broken, and of the collectives that failed."""
        facts = [fact.name for fact in self.facts if fact.state == "broken"]
        return (*facts, *(row.name for row in self.collectives.rows if row.state == "failed"))

    def as_json(self) -> dict[str, Any]:
        """Return the report as values that `json` can write."""
        return {
            "broken": list(self.broken),
            "facts": [asdict(fact) for fact in self.facts],
            "strategies": [asdict(entry) | {"ready": entry.is_ready} for entry in self.strategies],
            "collectives": asdict(self.collectives),
        }


def examine(num_ranks: int, on_progress: Callable[[str], None] = lambda what: None) -> Report:
    """Look at this machine, and run every collective on ranks that are started here.

    Args:
        num_ranks: the number of ranks.
        on_progress: called with what is looked at next.

    Raises:
        ConfigurationError: there are no ranks, or too many for the memory of this machine.
    """
    check_ranks(num_ranks)
    facts: list[Fact] = []
    sections: dict[str, Callable[[], list[Fact]]] = {
        "versions": version_facts,
        "devices": device_facts,
        "network": network_facts,
        "host memory and limits": host_facts,
        "compiler and operators": operator_facts,
        "NVMe": lambda: [nvme_fact()],
    }
    for what, look in sections.items():
        on_progress(what)
        try:
            facts += look()
        except Exception as error:  # of a machine unlike any that was seen; the other facts matter all the more
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            facts.append(Fact(name=what, found=f"could not be examined: {reason}", state="warning"))
    on_progress(f"{num_ranks} ranks start")
    collectives = run_collectives(num_ranks, on_row=lambda row: on_progress(f"collectives, {row.name} done"))
    return Report(facts=tuple(facts), strategies=tuple(strategies_readiness(facts)), collectives=collectives)


def render(report: Report) -> RenderableType:
    """Return the tables of a report, for 80 columns and more."""
    facts = [(_styled(fact.state), escape(fact.name), _with_advice(fact.found, fact.advice)) for fact in report.facts]
    rows = [row for row in report.collectives.rows if row.name != START or row.state != "ok"]
    if rows and rows[0].name == START:
        rows = rows[:1]  # nothing ran
    return Group(
        make_table(("", "", "found"), [*facts, *_strategy_rows(report.strategies)], left=(0, 1, 2)),
        _title(report.collectives),
        make_table(("", "collective", "8 bytes", "4 MiB", ""), map(_collective_row, rows), left=(0, 1, 4)),
        _verdict(report),
    )


def _with_advice(found: str, advice: str) -> str:
    return escape(found) + (f"\n[bold]{escape(advice)}[/bold]" if advice else "")


def _styled(state: str) -> str:
    return f"[{_STYLES[state]}]{state}[/]"


def _strategy_rows(strategies: tuple[Readiness, ...]) -> Iterator[tuple[str, str, str]]:
    """Return a row for the strategies that are ready, and one for all that lack the same."""
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for entry in strategies:
        alike.setdefault((entry.lacks, entry.advice), []).append(entry.name)
    for (lacks, advice), names in sorted(alike.items()):  # those that lack nothing come first
        shown = ", ".join(names)
        if lacks:
            lack = f"{shown} lack{'s' * (len(names) == 1)} {', '.join(lacks)}"
            yield _styled("note"), "not ready", _with_advice(lack, "\n".join(advice))
        else:
            yield _styled("ok"), "ready", escape(shown)


def _title(results: CollectiveResults) -> Text:
    where = "CUDA devices" if results.device == "cuda" else "CPU"
    started = [row.latency for row in results.rows if row.name == START and row.latency is not None]
    took = f", started in {format_seconds(started[0])}" if started else ""
    return Text(f"{results.ranks} rank{'s' * (results.ranks != 1)} on {where}, backend {results.backend}{took}", "bold")


def _collective_row(row: CollectiveRow) -> tuple[str, ...]:
    latency = "" if row.latency is None else format_seconds(row.latency)
    bandwidth = "" if row.bandwidth is None else f"{format_bytes(row.bandwidth)}/s"
    return _styled(row.state), row.name, latency, bandwidth, escape(row.reason)


def _verdict(report: Report) -> Text:
    if report.broken:
        return Text(f"Broken: {', '.join(report.broken)}.", style="bold red")
    return Text("Nothing is broken.", style="green")
