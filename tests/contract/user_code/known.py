"""Cells that are known to be open: neither equal nor refused. Each is a defect; the aim is that there are none."""

from pathlib import Path

from tests.contract.user_code.outcomes import Outcome

LIST = Path(__file__).with_name("known.txt")
"""A line each: row | column | what it does."""


def read() -> dict[tuple[str, str], str]:
    """Return what is known of each open cell."""
    if not LIST.exists():
        return {}
    lines = [line.split(" | ", 2) for line in LIST.read_text().splitlines()]
    return {(row, column): reason for row, column, reason in lines}


def write(outcomes: dict[tuple[str, str], Outcome]) -> None:
    """Write the list anew."""
    lines = [f"{row} | {column} | {_short(found)}" for (row, column), found in outcomes.items()]
    LIST.unlink(missing_ok=True)
    if lines:
        LIST.write_text("\n".join(lines) + "\n")


def _short(found: Outcome) -> str:
    return f"{found.kind}: {' '.join(found.reason.split())}"[:160]


KNOWN = read()
