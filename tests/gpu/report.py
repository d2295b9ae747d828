"""The output of the GPU programs: a line per check as it ends, a JSON file that is valid at any time, a table."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.crew import Answer
from tests.tables import markdown, write_json

_LINE = 160


@dataclass(frozen=True)
class Row:
    """A check that has ended."""

    name: str
    status: str
    """`"passed"`, `"failed"` or `"skipped"`."""
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Why it failed or was skipped."""

    @property
    def told(self) -> str:
        """The last line of the reason, or the facts if there is none."""
        return self.reason.strip().splitlines()[-1] if self.reason.strip() else brief(self.facts)


def as_row(name: str, seconds: float, answers: Sequence[Answer]) -> Row:
    """Return the row of a check from the answers of its ranks.

    A check returns a mapping of facts. Its key `"failures"` lists sentences that say what went wrong.
    """
    broken = [(rank, answer) for rank, answer in enumerate(answers) if answer.status in ("raised", "lost")]
    if broken:
        reason = "\n".join(f"rank {rank}: {answer.value}" for rank, answer in broken)
        return Row(name, "failed", seconds, reason=reason)
    skipped = [answer.value for answer in answers if answer.status == "skipped"]
    if skipped:
        return Row(name, "skipped", seconds, reason=skipped[0])
    facts = dict(answers[0].value or {})
    failures = [failure for answer in answers for failure in (answer.value or {}).get("failures", ())]
    facts.pop("failures", None)
    return Row(name, "failed" if failures else "passed", seconds, facts, "\n".join(dict.fromkeys(failures)))


class Report:
    """Rows, printed as they come, and saved in `folder/NAME.json` and at the end in `folder/NAME.md`."""

    def __init__(self, name: str, folder: Path, about: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.json"
        self.about = dict(about)
        self._began = time.monotonic()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Print and save a row."""
        self.rows.append(row)
        print(f"{row.status.upper():7} {row.name:38} {row.seconds:6.1f} s  {row.told[:_LINE]}", flush=True)
        self._write()

    def _write(self) -> None:
        content = {
            "about": self.about | {"seconds": round(time.monotonic() - self._began, 1)},
            "counts": self.counts,
            "checks": [asdict(row) for row in self.rows],
        }
        write_json(self.path, content)

    @property
    def counts(self) -> dict[str, int]:
        """Number of checks by status."""
        return {status: sum(row.status == status for row in self.rows) for status in ("passed", "failed", "skipped")}

    def finish(self) -> int:
        """Print the table and what failed; return the exit code."""
        self._write()
        rows = [(row.name, row.status, f"{row.seconds:.1f}", row.told[:400].replace("|", "\\|")) for row in self.rows]
        table = markdown(("check", "result", "s", "facts"), rows)
        self.path.with_suffix(".md").write_text(table + "\n")
        print(f"\n{table}\n", flush=True)
        for row in self.rows:
            if row.status == "failed":
                print(f"FAILED {row.name}: {brief(row.facts)}\n{row.reason[-3000:]}\n", flush=True)
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items())
        print(f"{counts} in {time.monotonic() - self._began:.0f} s; {self.path}", flush=True)
        return 1 if self.counts["failed"] or not self.counts["passed"] else 0


def brief(facts: Mapping[str, Any]) -> str:
    """Return facts as one line."""
    return ", ".join(
        f"{name} {value:.3g}"
        if isinstance(value, float)
        else f"{name} {{{brief(value)}}}"
        if isinstance(value, Mapping)
        else f"{name} {value}"
        for name, value in facts.items()
    )
