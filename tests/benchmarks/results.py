"""Results of benchmarks, kept with what they were measured with, for the documentation."""

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("results.json")
LIBRARIES = ("torch", "lightning", "deepspeed")


def load() -> dict[str, Any]:
    """Return all results, by name."""
    found: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {}
    return found


def store(name: str, record: dict[str, Any]) -> None:
    """Replace the results called `name`, with today's date, versions and machine."""
    results = load() | {name: {"date": f"{datetime.now(UTC):%Y-%m-%d}", "with": measured_with(), **record}}
    PATH.write_text(json.dumps(dict(sorted(results.items())), indent=2, ensure_ascii=False) + "\n")


def measured_with() -> str:
    """Return the versions and the machine, in words."""
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in LIBRARIES)]
    return f"{', '.join(versions)}; {os.cpu_count()} CPU cores ({platform.machine()})"
