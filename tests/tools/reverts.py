"""Revert past fixes one at a time, and print which of them the lanes of the tests find.

    python -m tests.tools.reverts                    # all fixes in the lanes default and full, which takes hours
    python -m tests.tools.reverts --lane full tests/unit --only 9ca728c
    python -m tests.tools.reverts --lane named       # only the tests that the patches name

Each file in `tests/tools/reverts` brings the defect of a past fix back into the code of today. It is a patch whose
first lines name the commit of the fix and tests that fail without it. The files of these tests run first. If they pass,
the whole lane runs. A failure counts if the test passes with the fix.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PATCHES = Path(__file__).parent / "reverts"


def git(*arguments: str, at: Path = REPOSITORY) -> None:
    subprocess.run(["git", *arguments], cwd=at, check=True, capture_output=True)


def first_failure(at: Path, arguments: Sequence[str]) -> str | None:
    """Run pytest until a test fails, and return its ID, or how pytest ended; `None` if no test fails."""
    failed = at / ".pytest_cache/v/cache/lastfailed"
    failed.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-x", "-q", *arguments]
    ended = subprocess.run(command, cwd=at, env=os.environ | {"PYTHONPATH": str(at)}, capture_output=True, text=True)
    if failed.exists():
        return str(next(iter(json.loads(failed.read_text()))))
    return None if ended.returncode in (0, 5) else f"exit status {ended.returncode}: {ended.stdout[-300:]}"


def find(at: Path, patch: Path, lane: str, paths: Sequence[str]) -> str | None:
    """Return the first test of a lane that fails without the fix of `patch`, and passes with it."""
    tests = re.findall(r"^Test: (.+)$", patch.read_text(), re.MULTILINE)
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    for chosen in [tests] if lane == "named" else [files, paths]:
        options = ["--lane", "all" if lane == "named" else lane]
        while True:
            git("apply", str(patch), at=at)
            failing = first_failure(at, [*options, *chosen])
            git("apply", "--reverse", str(patch), at=at)
            if failing is None:
                break
            if "::" not in failing or first_failure(at, [*options, failing]) is None:
                return failing
            options += ["--deselect", failing]  # it fails with the fix, too
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="restrict the lanes to these files and folders")
    parser.add_argument("--lane", action="append", help='may be repeated; "named": only the tests of the patches')
    parser.add_argument("--only", metavar="HASH", default="", help="revert only this fix")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder, "worktree")
        git("worktree", "add", "--detach", str(at))
        try:
            for patch in sorted(PATCHES.glob(f"{arguments.only}*.patch")):
                for lane in arguments.lane or ("default", "full"):
                    print(patch.stem, lane, find(at, patch, lane, arguments.paths) or "NOT FOUND", flush=True)
        finally:
            git("worktree", "remove", "--force", str(at))


if __name__ == "__main__":
    main()
