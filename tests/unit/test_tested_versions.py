"""All files state the same tested versions, and users of other versions are warned."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import lightning_paral
from lightning_paral.tested_versions import TESTED_VERSIONS, oldest_tested

ROOT = Path(lightning_paral.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = {each.name: each for each in map(Requirement, PROJECT["dependencies"])}


def pins_of(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_pyproject_admits_the_tested_versions() -> None:
    for name, tested in TESTED_VERSIONS.items():
        assert REQUIRED[name].specifier == SpecifierSet(tested)


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt"])
def test_constraints_are_admitted(file: str) -> None:
    pins = pins_of(file)
    for name, required in REQUIRED.items():
        assert required.specifier.contains(pins[name]), f"{file}: {name}=={pins[name]}"


def test_the_oldest_set_is_the_oldest_that_is_admitted() -> None:
    pins = pins_of("constraints-oldest.txt")

    for name, required in REQUIRED.items():
        [lowest] = [each for each in required.specifier if each.operator == ">="]
        assert SpecifierSet(f"=={lowest.version}").contains(pins[name]), f"{name}: {lowest.version}, {pins[name]}"
    assert SpecifierSet(f"=={oldest_tested('torch')}").contains(pins["torch"])


IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
import lightning.pytorch
print("imported", file=sys.stderr)
import lightning_paral
"""


def said(folder: Path, versions: dict[str, str]) -> list[str]:
    """Return the lines that an import prints if these versions are installed in `folder`."""
    for name, version in versions.items():
        information = folder / f"{name}-{version}.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    command = [sys.executable, "-c", IMPORT, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=ROOT)
    lines = run.stderr.splitlines()
    return lines[lines.index("imported") + 1 :]


def test_versions_outside_the_range_are_named_in_one_line(tmp_path: Path) -> None:
    [line] = said(tmp_path, {"torch": "2.14.0+cu130", "deepspeed": "0.19.3"})

    assert "tested with torch>=2.11,<2.14, deepspeed>=0.19.8,<0.20, but torch 2.14.0+cu130, deepspeed 0.19.3" in line


def test_versions_in_the_range_are_not_mentioned(tmp_path: Path) -> None:
    versions = {"torch": f"{oldest_tested('torch')}a0+nv25", "lightning": "2.6.1", "deepspeed": "0.19.9"}
    assert said(tmp_path, versions) == []
