"""Revert past fixes one at a time, and print which of them the lanes of the tests find.

    python -m tests.tools.reverts                    # all fixes in the lanes default and full, which takes hours
    python -m tests.tools.reverts --lane full tests/unit --only 9ca728c
    python -m tests.tools.reverts --named            # only the tests that the patches name

Each file in `tests/tools/reverts` brings the defect of a past fix back into the code of today. It is a patch whose
first lines name the commit of the fix, its area, and tests that fail without it. The lane's part of their files runs
first. If it passes, the whole lane runs. A failure counts if the test passes with the fix.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tabulate import tabulate

REPOSITORY = Path(__file__).parents[2]
PATCHES = Path(__file__).parent / "reverts"
NAMED = "named tests"
"""In place of a lane: run only the tests that the patches name."""


@dataclass(frozen=True)
class Fix:
    commit: str
    subject: str
    area: str
    tests: tuple[str, ...]
    patch: Path


def read_fix(patch: Path) -> Fix:
    """Read the first lines of a patch: `Commit: HASH SUBJECT`, `Area: AREA`, and `Test: ID` for each test."""
    fields = re.findall(r"^(Commit|Area|Test): (.+)$", patch.read_text(), re.MULTILINE)
    (commit,), (area,), tests = ([value for name, value in fields if name == key] for key in ("Commit", "Area", "Test"))
    return Fix(*commit.split(" ", 1), area, tuple(tests), patch)


class Worktree:
    """A checkout of the current commit in a temporary folder, in which one fix at a time is reverted.

    Args:
        path: the folder.
        limit: the time limit of each call of pytest, in seconds.
    """

    def __init__(self, path: Path, limit: float) -> None:
        self._path = path
        self._limit = limit

    def find(self, fix: Fix, lane: str, paths: Sequence[str]) -> dict[str, Any]:
        """Return the first test that fails without `fix`, or `None`, and how many seconds it took to find out."""
        start = time.monotonic()
        options = ["--lane", "all" if lane == NAMED else lane]
        failing = None
        files = dict.fromkeys(test.partition("::")[0] for test in fix.tests)  # whole: the lanes choose among the tests
        for tests in [fix.tests] if lane == NAMED else [files, paths]:
            failing = failing or self._find_among(fix, options, list(tests))
        return {"found_by": failing, "seconds": round(time.monotonic() - start)}

    def _find_among(self, fix: Fix, options: list[str], tests: list[str]) -> str | None:
        while True:
            with self.without(fix):
                failing = self.first_failure([*options, *tests])
            if failing is None or "::" not in failing or self.first_failure([*options, failing]) is None:
                return failing
            options = [*options, "--deselect", failing]  # it fails with the fix, too

    def applies(self, fix: Fix) -> bool:
        """Return whether the code is still such that the patch of `fix` can change it."""
        check = ["git", "apply", "--check", str(fix.patch)]
        return subprocess.run(check, cwd=self._path, capture_output=True).returncode == 0

    @contextmanager
    def without(self, fix: Fix) -> Iterator[None]:
        """Revert `fix` inside the block."""
        git("apply", str(fix.patch), at=self._path)
        try:
            yield
        finally:
            git("apply", "--reverse", str(fix.patch), at=self._path)

    def first_failure(self, arguments: Sequence[str]) -> str | None:
        """Run pytest until a test fails; return its ID, how pytest ended if it ended otherwise, or `None`."""
        failed = self._path / ".pytest_cache/v/cache/lastfailed"
        failed.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-x", "-q", *arguments]
        log = self._path / "pytest.log"
        with log.open("w") as file:
            environment = os.environ | {"PYTHONPATH": str(self._path)}
            pipes = {"stdout": file, "stderr": file}
            process = subprocess.Popen(command, cwd=self._path, env=environment, start_new_session=True, **pipes)
            try:
                status = process.wait(self._limit)
            except subprocess.TimeoutExpired:
                print(f"Not finished after {self._limit:g} s: pytest {' '.join(arguments)}", file=sys.stderr)
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if failed.exists():
            return str(next(iter(json.loads(failed.read_text()))))
        if status == pytest.ExitCode.USAGE_ERROR:  # such as a test that has another name now
            print(*log.read_text().splitlines()[-3:], sep="\n", file=sys.stderr)
            return None
        return None if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else f"exit status {status}"


@contextmanager
def worktree(limit: float) -> Iterator[Worktree]:
    """Check out the current commit in a temporary folder for the block."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worktree"
        git("worktree", "add", "--detach", str(path), at=REPOSITORY)
        try:
            yield Worktree(path, limit)
        finally:
            git("worktree", "remove", "--force", str(path), at=REPOSITORY)


def git(*arguments: str, at: Path) -> str:
    return subprocess.run(["git", *arguments], cwd=at, check=True, capture_output=True, text=True).stdout.strip()


def table(fixes: Sequence[Fix], lanes: Sequence[str], results: dict[str, Any]) -> str:
    """Return a table of what each lane has found."""
    found = [[results[f"{fix.commit} {lane}"]["found_by"] for lane in lanes] for fix in fixes]
    rows = [
        [f"{fix.commit} {fix.subject}", fix.area, *("yes" if each else "NO" for each in by), next(filter(None, by), "")]
        for fix, by in zip(fixes, found, strict=True)
    ]
    sums = [f"{sum(map(bool, by))} of {len(fixes)}" for by in zip(*found, strict=True)]
    return tabulate([*rows, ["", "", *sums, ""]], ["fix", "area", *lanes, "first failing test"], tablefmt="github")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="restrict the lanes to these files and folders")
    parser.add_argument("--lane", action="append", help="a lane; may be repeated (default: default and full)")
    parser.add_argument("--named", action="store_true", help="run only the tests that the patches name, of any lane")
    parser.add_argument("--only", action="append", metavar="HASH", help="revert only this fix; may be repeated")
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS", help="time limit of a call of pytest")
    parser.add_argument("--results", type=Path, default="reverts.json", help="results by commit; a run continues them")
    arguments = parser.parse_args()
    lanes = [NAMED] if arguments.named else arguments.lane or ["default", "full"]
    fixes = [
        fix for fix in map(read_fix, sorted(PATCHES.glob("*.patch"))) if fix.commit in (arguments.only or fix.commit)
    ]
    stored = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    results = stored.setdefault(git("rev-parse", "HEAD", at=REPOSITORY), {})
    with worktree(arguments.limit) as checkout:
        if outdated := [fix.patch.name for fix in fixes if not checkout.applies(fix)]:
            parser.error(f"write these patches for the code of today: {', '.join(outdated)}")
        for fix in fixes:
            for key, lane in ((f"{fix.commit} {lane}", lane) for lane in lanes):
                if key not in results:
                    results[key] = checkout.find(fix, lane, arguments.paths)
                    arguments.results.write_text(json.dumps(stored, indent=1))
                    print(key, results[key], file=sys.stderr)
    print(table(fixes, lanes, results))


if __name__ == "__main__":
    main()
