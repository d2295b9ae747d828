"""CONTRIBUTING, the glossary and the metadata files agree with the repository."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import lightning_paral

pytestmark = pytest.mark.source

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_paral"
CI = (ROOT / ".ci/run").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
COMMANDS = [
    command.strip()
    for block in re.findall(r"^```bash\n(.*?)^```", CONTRIBUTING, flags=re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    for command in line.split("&&")
]
TESTS = re.findall(r"`(pytest[^`]*)`", CONTRIBUTING)
CHECKS = ["ruff check .", "ruff format --check .", "mypy", "codespell"]
PATHS = re.findall(r"`([\w./-]+(?:/|\.py|\.md|\.toml|\.txt|\.yaml))`", CONTRIBUTING)


def test_checks_equal_those_of_ci_and_pre_commit() -> None:
    assert set(CHECKS) <= set(COMMANDS)
    lines = [line.strip().removesuffix(" || status=1") for line in CI.splitlines()]
    assert [line for line in lines if line in CHECKS] == CHECKS
    assert [shlex.split(hook["entry"])[0] for hook in HOOKS] == [shlex.split(check)[0] for check in CHECKS]
    for command in COMMANDS:
        if "constraints" in command or command.startswith("mkdocs"):
            assert command.removeprefix("pip install ") in CI


def test_test_commands_name_existing_tests() -> None:
    expanded = subprocess.check_output(["bash", "-c", f"echo {' '.join(TESTS)}"], text=True)  # {unit,distributed}
    paths = [word for word in expanded.split() if "/" in word]

    assert len(paths) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_paths_in_contributing_exist() -> None:
    bases = (ROOT, PACKAGE, *(PACKAGE / room for room in ("checkpoint", "engines", "strategies")))
    paths = [path.replace("configs/strategies/NAME.yaml", "configs/strategies") for path in PATHS]

    assert not [path for path in paths if not any((base / path).exists() for base in bases)]


def test_every_folder_of_the_package_is_described() -> None:
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}

    assert folders <= set(PATHS)


def test_glossary_is_sorted_and_defines_each_term_once() -> None:
    glossary = (ROOT / "docs/glossary.md").read_text()
    terms = [term.lower() for term in re.findall(r"^- \*\*(.+?)\*\*", glossary, flags=re.MULTILINE)]

    assert terms == sorted(set(terms))
    assert len(terms) > 40


def test_citation_and_security_name_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = lightning_paral.__version__

    assert (citation["version"], citation["license"]) == (version, PYPROJECT["project"]["license"])
    assert f"| {version.rpartition('.')[0]} | yes |" in (ROOT / "SECURITY.md").read_text()
