"""The table of how runs ended."""

from collections.abc import Callable, Iterable
from statistics import median

from tests.distributed.faults.cases import EXCEPTIONS
from tests.distributed.faults.runs import Result

HEADINGS = ("runs", "shown", "at end", "once", "median s", "worst s", "orphans", "wrong status")


def format_table(results: list[Result]) -> str:
    """Return the tables by strategy and launcher, by fault, and by stage, and the list of bad ends."""
    parts = [
        _table("strategy, launcher", results, lambda result: f"{result.case.strategy}, {result.case.launcher}"),
        _table("fault", results, lambda result: result.case.fault),
        _table("stage", results, lambda result: result.case.stage),
        _table("nodes", results, lambda result: f"{result.case.nodes} ({result.case.ranks} ranks)"),
    ]
    bad = [result for result in results if result.faults]
    if bad:
        parts.append("\n".join(["Bad ends:", *map(describe, bad)]))
    return "\n\n".join(parts)


def describe(result: Result) -> str:
    """Return what is wrong, and the command that runs the case again."""
    return f"  {', '.join(result.faults)}: python -m tests.distributed.faults --only {result.case}"


def _table(title: str, results: list[Result], key: Callable[[Result], str]) -> str:
    """Return a table in Markdown, with the results of Lightning's own strategy in rows of their own."""

    def name(result: Result) -> str:
        is_foreign = result.case.strategy == "ddp" and "ddp" not in key(result)
        return f"{key(result)} (Lightning's ddp)" if is_foreign else key(result)

    groups: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda each: (each.case.strategy == "ddp", name(each))):
        groups.setdefault(name(result), []).append(result)
    rows = [(title, *HEADINGS), ("---",) * (len(HEADINGS) + 1), *((name, *_row(each)) for name, each in groups.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(results: list[Result]) -> tuple[str, ...]:
    reached = [result for result in results if result.has_failed]
    seconds = [result.seconds for result in reached]
    return (
        str(len(results)),
        _percent(result.shown for result in reached),
        _percent(result.at_end for result in reached),
        _percent(result.times == 1 for result in reached if result.case.fault in EXCEPTIONS),
        f"{median(seconds):.1f}" if seconds else "",
        f"{max(seconds):.1f}" if seconds else "",
        str(sum(result.orphans for result in reached)),
        str(sum(not result.is_status_right for result in reached)),
    )


def _percent(values: Iterable[bool]) -> str:
    found = list(values)
    return f"{100 * sum(found) / len(found):.0f} %" if found else ""
