"""Pages are in step with the code: generated parts, named files and variables.

`mkdocs build --strict` checks their links, their anchors and the navigation.
"""

import ast
import re
from pathlib import Path

import pytest

import lightning_paral
from lightning_paral import STRATEGIES
from tests.benchmarks.measure import BENCHMARKS
from tests.docs.generated import PAGES
from tests.docs.options import DATACLASSES, STRATEGY_CLASSES, TRAINERS_OWN, options_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES_OF_SITE = sorted(DOCS.rglob("*.md"))
PACKAGE = Path(lightning_paral.__file__).parent


def names(path: Path) -> str:
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=names)
def test_generated_parts_are_up_to_date(path: Path) -> None:
    assert path.read_text() == PAGES[path](), "run `python -m tests.docs --write`"


def test_every_option_is_described() -> None:
    for cls in (*STRATEGY_CLASSES, *DATACLASSES):
        for option in options_of(cls):
            assert option.doc or option.name in TRAINERS_OWN, f"{cls.__name__}({option.name})"


def test_environment_variables_are_those_of_the_code() -> None:
    used = {
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"PARAL_[A-Z_]+", node.value)
    }

    assert used == set(
        re.findall(r"^- \*\*`(PARAL_\w+)`\*\*", (DOCS / "reference/options.md").read_text(), re.MULTILINE)
    )


def test_messages_that_the_guide_quotes_are_those_of_the_code() -> None:
    text = (DOCS / "guides" / "failures.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)`", text, flags=re.MULTILINE)
    said = "\n".join(
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )

    assert len(quoted) > 4
    for message in quoted:
        assert all(part in said for part in re.split(r"\s*\.\.\.\s*", message)), message


@pytest.mark.parametrize("path", [path for path in PAGES_OF_SITE if path.parent.name != "reference"], ids=names)
def test_named_files_exist(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"`((?:lightning_paral|tests|configs|examples|docs)/[\w/.]*)`", text))
    if path.name == "architecture.md":
        rooms = "|".join(folder.name for folder in PACKAGE.iterdir() if folder.is_dir() and folder.name[0] != "_")
        named |= {f"lightning_paral/{found}" for found in re.findall(rf"^ *((?:{rooms})/[\w/.]*)", text, re.MULTILINE)}

    assert not [name for name in named if not (ROOT / name).exists()]


def test_measurements_and_correctness_are_shown_for_every_name() -> None:
    measurements, correctness = ((DOCS / f"{name}.md").read_text() for name in ("measurements", "correctness"))

    assert set(re.findall(r"<!-- begin: (\w+) -->", measurements)) == set(BENCHMARKS)
    assert all(f"`{line}`" in measurements for lines in BENCHMARKS.values() for line in lines)
    assert re.findall(r"^ (paral_\w+) +\w", correctness, re.MULTILINE) == [entry.name for entry in STRATEGIES]
