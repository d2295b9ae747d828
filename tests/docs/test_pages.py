"""Pages are in step with the code: generated parts, named files and variables.

`mkdocs build --strict` checks their links, their anchors and the navigation.
"""

import ast
import re
from pathlib import Path

import pytest

import lightning_paral
from tests.benchmarks.correctness import NAMES, ONE_PROCESS
from tests.benchmarks.measure import BENCHMARKS, load
from tests.docs import claims
from tests.docs.errors import WARNINGS, messages
from tests.docs.generated import PAGES, PLOTS
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


@pytest.mark.parametrize("path", PLOTS, ids=names)
def test_plots_show_the_measured_data(path: Path, tmp_path: Path) -> None:
    plot, drawn = PLOTS[path](), tmp_path / "plot.svg"
    assert plot.is_up_to_date(path), "run `python -m tests.docs --write`"

    pytest.importorskip("matplotlib", reason="matplotlib is not installed; the extra `docs` installs it")
    drawn.write_text(plot.render())

    assert plot.is_up_to_date(drawn)
    assert drawn.read_text() == plot.render()


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


def test_every_error_with_a_message_of_its_own_is_listed() -> None:
    listed = {message.text for message in messages() if message.kind not in WARNINGS}

    assert len(listed) > 200
    assert any(text.startswith("There is no strategy named") for text in listed)
    assert any(text.startswith("Cannot listen on MASTER_PORT=") for text in listed)


def test_messages_that_the_guide_quotes_are_those_of_the_code() -> None:
    text = (DOCS / "guides" / "failures.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)`", text, flags=re.MULTILINE)
    known = [message.text for message in messages()]
    source = "\n".join(path.read_text() for path in (PACKAGE / "engines").rglob("*.py"))  # also lines of the log

    assert len(quoted) > 4
    for message in quoted:
        parts = [part for part in re.split(r"\s*\.\.\.\s*", message) if part]
        pattern = ".*".join(map(re.escape, parts))
        assert any(re.search(pattern, text) for text in known) or all(part in source for part in parts), message


@pytest.mark.parametrize("path", [path for path in PAGES_OF_SITE if path.parent.name != "reference"], ids=names)
def test_named_files_exist(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"`((?:lightning_paral|tests|configs|examples|docs)/[\w/.]*)`", text))
    if path.name == "architecture.md":
        rooms = "|".join(folder.name for folder in PACKAGE.iterdir() if folder.is_dir() and folder.name[0] != "_")
        named |= {f"lightning_paral/{found}" for found in re.findall(rf"^ *((?:{rooms})/[\w/.]*)", text, re.MULTILINE)}

    assert not [name for name in named if not (ROOT / name).exists()]


def test_measured_commands_have_results() -> None:
    results = load()

    assert set(results) == {*BENCHMARKS, "correctness"}
    for record in results.values():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
        assert all(f"{library} " in record["with"] for library in ("Python", "torch", "lightning", "deepspeed"))


def test_claims_have_a_source_and_say_whether_they_hold() -> None:
    found = re.split(r"^<!-- begin: \w+ -->$", (DOCS / "claims.md").read_text(), flags=re.MULTILINE)

    assert len(found) == len(claims.FIGURES) + 1
    for claim in found[:-1]:
        paragraph = claim.split("<!-- end")[-1]
        assert re.search(
            r"\*\*[^*]+\.\*\*\s+Source:\s[^]]+\]\(https://(arxiv\.org/abs/\d{4}\.\d{5}|[\w./-]+)\)", paragraph
        )
    for figure in found[1:]:
        assert re.match(r"\s*\*\*(Holds|Does not hold|Planned)", figure), figure


def test_correctness_is_shown_for_every_name() -> None:
    rows = load()["correctness"]["rows"]

    assert list(rows) == [ONE_PROCESS, *NAMES]
    assert max(row["training_difference"] for row in rows.values()) < 1e-4
    assert max(row["validation_difference"] for row in rows.values()) < 1e-4
